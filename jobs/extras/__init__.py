"""Commands, kinds of stages and watchers that the core does without."""
