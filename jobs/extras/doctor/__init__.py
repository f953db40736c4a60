"""Check, measure and repair a set of shards."""
