"""Finds a worker that is slower than the others, by how much, and why."""
