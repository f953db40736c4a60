"""Before a run starts: plan it, measure its training steps, and check the cluster."""
