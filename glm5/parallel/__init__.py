"""Tensor parallelism: placement of tensors, collectives, and the modules that use them."""
