"""Optimizers: Muon Split for matrices, AdamW for the rest."""
