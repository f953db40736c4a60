"""Measure the storage and the network of a cluster's workers."""
