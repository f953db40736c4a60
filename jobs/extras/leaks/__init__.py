"""Find training images that also occur in a test set."""
