"""What a run shows outside of its folder: gauges for Prometheus, W&B and MLflow."""
