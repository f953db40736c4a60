"""Estimate the memory, time and cost of a stage."""
