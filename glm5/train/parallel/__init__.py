"""Training over several processes: who holds which rows of what, and the modules and steps that make it one run.

The model knows nothing of it. What differs enters where it has seams: experts (`experts.py`), keys (`context.py`), the
layers of a stage (`pipeline.py`), and FSDP2 around modules (`shards.py`).
"""
