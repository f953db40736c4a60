"""Send the metrics of a run to Prometheus, Weights & Biases and MLflow."""
