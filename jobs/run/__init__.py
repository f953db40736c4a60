"""Run a campaign: the lifecycle of one command on a run, and of each stage in it."""
