"""Metrics for Prometheus, Weights & Biases and MLflow."""
