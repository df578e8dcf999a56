"""The model over the rows of a step: `passes.py`; `drafting.py` for the MTP layer; `routing.py` records experts."""
