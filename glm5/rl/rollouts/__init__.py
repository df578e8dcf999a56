"""Rollouts: the policy plays episodes through the engine. `chat.py` turns messages into tokens and back, `policy.py`
samples, `harness.py` plays one group, `collect.py` all groups of a step."""
