"""How fast training is on a GPU, and what it holds: a full-size layer, its optimizer, attention, small models."""
