"""Estimate memory, time and cost of a stage."""
