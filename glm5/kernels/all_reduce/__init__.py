"""Sums over ranks. The reference takes all parts at once; `triton.py` has kernels that write to other GPUs."""

from glm5.kernels.all_reduce.reference import all_reduce_reference, is_transposed

__all__ = ["all_reduce_reference", "is_transposed"]
