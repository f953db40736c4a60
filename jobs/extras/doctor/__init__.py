"""Check, measure and repair a data set."""
