"""Run a function on N supervised workers: on a Ray cluster (existing or embedded), or in local processes."""
