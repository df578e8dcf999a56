"""Environments: tasks with rewards that a program checks. `protocol.py` says what an environment is; every other file
here is one, and `table.py` lists them by name."""
