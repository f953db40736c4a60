"""The DeepSpeed engine: settings, parameters and state, gradient norms, and exact mode."""
