"""GGUF, the file that llama.cpp loads: one file with metadata, tokenizer, chat template and weights.

blocks        codes and scales <-> blocks of 32 values         tensors       which tensors the file has, and their types
metadata      a config as GGUF's keys                          vocabulary    a tokenizer as GGUF's keys
file          the file: laid out at once, filled in place

Header and names are the package `gguf`'s, which llama.cpp maintains (extra `gguf`). Weights go through its writer no
further than their names and shapes, because it takes them in their order only, and a run may be cut off and go on.
"""
