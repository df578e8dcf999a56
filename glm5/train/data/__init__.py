"""What a step trains on: token files, samplers, mixtures, packing, conversations, generated tasks. No torch."""
