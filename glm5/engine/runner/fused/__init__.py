"""The model as fused kernels, for GPUs. Begin with `fused_model.py`; docs/map.md relates its lines to the model's.
`fused_linear.py` joins linear layers of one input, `row_sharding.py` shards long prompts over ranks by rows.
"""
