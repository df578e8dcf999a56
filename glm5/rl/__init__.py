"""Reinforcement learning: `glm5 rl RECIPE.toml` (docs/rl.md).

Begin with `segments.py` (what a rollout consists of), `environments/protocol.py` (what is asked and rewarded),
`algorithms/` (the formulas), then `loop.py` (a run).
"""
