"""A scheduler's surroundings without a model: what a plan does to pages, what comes back, and what must hold.

device   pages, slots and tiers whose contents can be told from any others     world    random requests and messages
audit    what must hold after every call, computed anew from all that is held   plans    what every plan must keep to
mutants  schedulers with one rule broken, which the rest must notice
"""
