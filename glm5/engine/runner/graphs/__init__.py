"""Steps as CUDA graphs. Begin with `captured.py`: graphs by key, in one memory pool.

decode   steps in which every sequence decodes     prompts   steps with prompts     passes   deterministic mode's
"""
