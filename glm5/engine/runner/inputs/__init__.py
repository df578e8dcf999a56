"""Inputs of a step: `batch.py` (rows), `slot_state.py` (state of sequences), `view.py` (the cache)."""
