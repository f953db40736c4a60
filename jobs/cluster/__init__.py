"""Run a function on N supervised workers: on a Ray cluster, joined or embedded, or in processes of this machine."""
