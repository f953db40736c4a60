"""Judges the commits of a stage on places that training leaves free."""
