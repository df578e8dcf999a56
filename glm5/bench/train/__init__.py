"""Speed and memory of training on GPUs: a full-size layer, its optimizer, attention, small models."""
