"""The paged KV cache. Begin with `kv_cache.py`: one page id for latents and index keys of every layer.

pages, prefix   which pages are free, and the tree of prefixes that requests share
capacity        how many pages fit               memory   memory that sleep releases
"""
