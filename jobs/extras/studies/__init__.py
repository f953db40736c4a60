"""Sweeps with their tables, figures and scaling laws."""
