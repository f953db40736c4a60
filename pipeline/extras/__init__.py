"""Training features that the core does without."""
