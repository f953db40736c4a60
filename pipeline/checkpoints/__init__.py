"""What a run saves: how it is written and committed, verified, read and pruned."""
