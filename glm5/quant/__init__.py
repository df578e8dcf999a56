"""Quantization as pure functions over stacked tensors, and tables of facts: no files, no streaming, no settings.

Leading dimensions are a batch: functions run on one expert or on all experts of a layer, with bitwise the same results
for each. float32 in, float32 out; float64 in, float64 out, so that every function can be its own reference.
"""
