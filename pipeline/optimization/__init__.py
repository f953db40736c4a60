"""The optimizers, the learning rate and the losses, as pure functions and small configs."""
