"""`glm5 bench rl`: reinforcement learning here and in TRL, from one checkpoint on one task (docs/rl.md)."""
