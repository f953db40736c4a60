"""Accuracy of a model, its features, and the few-shot probe on them."""
