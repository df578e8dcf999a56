"""Rewards beside an environment's own (docs/rl-general.md): `judge.py` asks a generative judge, `guards.py` has the
penalties, `blend.py` makes one reward of all sources, `anchors.py` reads answers that people wrote."""
