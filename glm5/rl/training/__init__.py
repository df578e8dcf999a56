"""From finished rollouts to a training step.

repair.py      groups with failed rollouts are filled or dropped
sequences.py   rollouts become sequences with columns: what is trained, and with which advantage
packing.py     sequences become batches, the same number for each rank
objective.py   what a step minimises over them
exact.py       its pass in the engine's own arithmetic, bit for bit (engine_pass.py, graft.py)
expert_replay.py   its pass through the experts that the engine chose
policy.py      the step itself, and log-probabilities by a model as it is before the step
"""
