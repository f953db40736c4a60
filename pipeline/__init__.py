"""A model and batches become checkpoints and numbers."""
