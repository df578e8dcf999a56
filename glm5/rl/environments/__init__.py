"""Environments: tasks with rewards that a program checks (docs/rl-environments.md).

`protocol.py` says what an environment is, `table.py` lists them by name, `workers.py` runs their episodes in processes
of their own, `mixture.py` and `ladder.py` choose tasks.
"""
