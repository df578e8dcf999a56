"""Distributed training: the layout of parameters over ranks, and the modules and steps of a distributed run.

The model is not changed. Parallelism enters at its seams: experts (`experts.py`), keys (`context.py`), the layers of a
pipeline stage (`pipeline.py`), and FSDP2 around modules (`shards.py`).
"""
