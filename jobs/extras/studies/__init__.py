"""Sweeps, tables, figures and scaling laws."""
