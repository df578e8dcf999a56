"""Muon Split, Muon and AdamW: what each learns of the same steps of a small model, and what splitting does to updates."""
