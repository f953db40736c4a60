"""Training, checkpoints and evaluation: turns a model and batches into checkpoints, weights and metrics."""
