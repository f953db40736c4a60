"""Search training sets for images that also occur in test sets."""
