"""Plan a run, measure its training steps, and check the cluster before the run starts."""
