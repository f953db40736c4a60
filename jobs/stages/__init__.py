"""The core's kinds of stages, one file each."""
