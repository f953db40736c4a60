"""Plan a run, try its steps, and check the cluster before it starts."""
