"""Evaluate checkpoints and search spikes on spare workers during training."""
