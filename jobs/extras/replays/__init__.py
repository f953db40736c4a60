"""Repeat recorded steps: replay, audit, bisect, without."""
