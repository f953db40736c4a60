"""Inspect a folder of images before a recipe is written for it."""
