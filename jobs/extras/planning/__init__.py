"""Commands to use before a run: plan it, measure its training steps, and check its cluster."""
