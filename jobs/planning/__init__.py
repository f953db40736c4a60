"""Measures a machine or a cluster, and says what a campaign will take on it."""
