"""Compare two runs, stages or recipes."""
