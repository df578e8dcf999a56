"""Tensor parallelism over processes. Begin with `ranks.py`: the first rank tells the others what it was told.

follower   the engine of another rank      rank_wire   messages between ranks      loaded_pages   pages from tiers
"""
