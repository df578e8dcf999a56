"""Compares Muon Split, Muon and AdamW: loss at equal steps, and updates by head with and without splitting."""
