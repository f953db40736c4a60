"""Weights in and out of files, ours and those of other projects."""
