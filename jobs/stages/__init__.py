"""Core stage kinds, one file each."""
