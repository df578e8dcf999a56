"""vLLM's own routes: `generate.py` with its body and its answer; /tokenize and /detokenize in `tokens.py`; /version,
/load and others in `info.py`."""
