"""vLLM's small routes: /tokenize and /detokenize in `tokens.py`, /version and /is_sleeping in `info.py`."""
