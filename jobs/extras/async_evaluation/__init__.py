"""Evaluate checkpoints and find the causes of loss spikes on spare workers during training."""
