"""Tensor parallelism over processes. Begin with `ranks.py`: the first rank broadcasts its inputs to the others.

follower   the engine of another rank      rank_wire   messages between ranks      loaded_pages   pages from tiers
"""
