"""vLLM's small routes: /tokenize and /detokenize in `tokens.py`; /version, /load and others in `info.py`."""
