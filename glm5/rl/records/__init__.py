"""Rollouts on disk: `trace.py` is the record of one, `store.py` the files of a run, `digest.py` sums of its weights."""
