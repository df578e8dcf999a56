"""The engine's loop. Begin with `engine_core.py`: a turn takes messages, plans and launches a step, reads another.

interfaces   what the loop asks of runner, weights, cache and other ranks
intake       requests on their way to the scheduler         replies   tokens on their way to clients
control      pause, sleep, new weights, an empty cache      tiering   copies of pages to and from host and disk
depth        how many tokens to draft                       pace      how many prompt tokens a step may have
grammars     token bitmasks of a step                       stats, profiling
"""
