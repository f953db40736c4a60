"""Inspect a folder of images before writing a recipe for it."""
