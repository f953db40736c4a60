"""VTAB-1k: its 19 tasks, the labels that are derived, the 1,000 images of each, and the archives they come from."""
