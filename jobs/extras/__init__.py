"""Optional commands, stage kinds and watchers. The core of `jobs` works without them."""
