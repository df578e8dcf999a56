"""The transition from dense attention to DSA with a small model, and the ablations of GLM-5's report (2.1)."""
