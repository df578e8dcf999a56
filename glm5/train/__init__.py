"""Training: optimizers, losses and the step; data, stages and the loop around them."""
