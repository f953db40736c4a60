"""Image bytes to pixels: decoding, training augmentation, exact evaluation preprocessing."""
