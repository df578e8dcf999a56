"""Muon Split, Muon and AdamW on the same steps of a small model, each at a rate that was searched for."""
