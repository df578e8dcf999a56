"""Computes a step's plan on the device. Begin with `runner.py`: upload the batch, run the model, sample, draft.

inputs    the batch, per-request state on the device, and the model's view of the cache
forward   the model over a step's rows, the MTP layer's drafts, which experts were chosen
fused     the model's second form for GPUs, of fused kernels (docs/map.md)
graphs    steps as CUDA graphs           warm   compiles kernels and captures graphs before the first request
"""
