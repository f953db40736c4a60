"""Predict the classes of images with trained weights."""
