"""What a run shows outside of its folder: gauges for Prometheus, the metadata of its Ray job."""
