"""How long steps of a model of a known size take: the whole engine, with random weights.

    decoding    by batch, after prompts of one length; by context, of one sequence; with drafts, of one sequence
    prompts     one by itself; as many at once as decode together
    start       seconds of each phase, tokens in the cache

Times are measured by a client that receives the tokens of every step. Results are reported only if tokens visit experts
about uniformly (expert_coverage.py): with a router that sends all tokens to the same few experts, steps would be too
fast.
"""
