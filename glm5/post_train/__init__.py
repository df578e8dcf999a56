"""Post-training in stages, from a base model to a served, quantized checkpoint.

plan.py      a recipe's stages as recipes of existing commands, with what changes: start, folder, references
run.py       runs them in turn, each in a process of its own, and goes on where it was interrupted
measure.py   skills of a checkpoint through the engine; served.py: of the last one over HTTP
compare.py   what was gained, forgotten and given back, and a paired interval; page.py shows it
"""
