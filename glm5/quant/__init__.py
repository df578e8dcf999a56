"""Quantization as pure functions over stacked tensors, and tables of facts: no files, no streaming, no settings.

What is below runs on one expert or on all of a layer's at once: leading dimensions are a batch, and a batch gives the
bits that its members give alone. float32 in, float32 out; float64 the same, so every function can be its own oracle.
"""
