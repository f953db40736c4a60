"""Leaks: training images that are also in a test set, found by their pixels."""
