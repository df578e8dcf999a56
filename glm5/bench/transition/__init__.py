"""The transition from dense attention to DSA in miniature, with the ablations of the report beside it (2.1)."""
