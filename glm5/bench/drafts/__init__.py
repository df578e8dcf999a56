"""How many tokens a verification yields, by how the MTP layer was trained and how many are drafted."""
