"""What a step is computed from: `batch.py` (rows), `slot_state.py` (state of requests), `view.py` (the cache)."""
