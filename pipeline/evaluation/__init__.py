"""Evaluation: a model's accuracy, and probes of its features."""
