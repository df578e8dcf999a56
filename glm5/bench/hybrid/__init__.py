"""`glm5 bench hybrid`: what a hacked reward model, rules alone, and both with anchors make of a policy
(docs/rl-general.md)."""
