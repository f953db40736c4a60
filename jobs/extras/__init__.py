"""Optional commands, kinds of stages and watchers. The core of `jobs` works without them."""
