"""Sums over ranks: a reference over gathered parts, and Triton kernels that write to other GPUs (`triton*.py`)."""

from glm5.kernels.all_reduce.reference import all_reduce_reference, is_transposed

__all__ = ["all_reduce_reference", "is_transposed"]
