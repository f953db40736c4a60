"""The DeepSpeed engine: its settings, its parameters and state, gradient norms, and exact mode."""
