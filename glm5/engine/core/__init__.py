"""The engine's loop. Begin with `engine_core.py`: it handles messages, plans and launches a step, reads the last one.

interfaces   what the loop needs of runner, weights, cache and other ranks
intake       requests before they reach the scheduler       replies   tokens on their way to clients
control      pause, sleep, new weights, cache reset         tiering   copies of pages to and from host and disk
depth        how many tokens to draft                       pace      how many prompt tokens a step may have
grammars     token bitmasks of a step                       stats, profiling
"""
