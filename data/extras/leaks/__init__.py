"""Search training sets for images of test sets."""
