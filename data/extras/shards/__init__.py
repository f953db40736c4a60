"""Make data sets: write samples to shards, index existing tars, and select samples of an index."""
