"""Muon Split, Muon and AdamW: what each learns of the same steps, and what splitting does to updates."""
