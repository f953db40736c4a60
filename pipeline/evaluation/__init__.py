"""Evaluation: accuracy of a model, and probes of its features."""
