"""Repeat recorded training steps with some samples masked, to find the causes of gradient spikes."""
