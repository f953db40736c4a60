"""Decode images, augment them for training, and preprocess them for evaluation exactly as the reference does."""
