"""Repeat recorded training steps: replay, audit, bisect, without."""
