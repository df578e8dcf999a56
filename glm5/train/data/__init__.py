"""Training data: token files, sampling, mixtures, packing, conversations, generated tasks. No torch."""
