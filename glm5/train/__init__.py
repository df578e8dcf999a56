"""Training: optimizers, losses, the training step, data, stages and the loop around them."""
