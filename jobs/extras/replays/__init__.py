"""Repeat recorded training steps: the commands replay, audit, bisect and without."""
