"""Check, describe and repair data sets."""
