"""Muon Split for matrices, AdamW for the rest: which tensor is whose, the updates, and state that survives a save."""
