"""Evaluate checkpoints on spare workers during training."""
