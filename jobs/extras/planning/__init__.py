"""Plan a run, try its training steps, and check the cluster before the run starts."""
