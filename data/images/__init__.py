"""Decode images, augment them for training, and preprocess them exactly for evaluation."""
