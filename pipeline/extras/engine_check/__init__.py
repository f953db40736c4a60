"""Compare DeepSpeed's training step with plain torch's before the first step of an attempt."""
