"""VTAB-1k: its 19 tasks, their labels, and the 1,000 images of each out of prepared sets."""
