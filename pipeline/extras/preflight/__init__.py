"""Measure storage and network on the workers of a cluster."""
