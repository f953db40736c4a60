"""Repeat recorded steps on a worker, with samples masked."""
