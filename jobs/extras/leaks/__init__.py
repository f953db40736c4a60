"""Find training images that are also in a test set."""
