"""How long steps of a model of a known size take: the whole engine, with random weights.

    decoding    by batch, after prompts of one length; by context, of one sequence; with drafts, of one sequence
    prompts     one by itself; as many at once as decode together
    start       seconds of each phase, tokens in the cache

Times are of the client that hears of every step. Figures are told only if tokens visit experts as evenly as random
weights should have them do (expert_coverage.py): a router that sends all tokens to the same few would be fast and mean
nothing.
"""
