"""Checkpoints: written, committed, verified, read and deleted."""
