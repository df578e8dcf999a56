"""The formulas of reinforcement learning as functions of tensors, without trainer and engine.

    advantages.py   rewards of groups -> how much better than its group each rollout is
    gae.py          rewards and a critic's values -> the advantage of each token
    distillation.py log-probabilities by a teacher -> the advantage of each token, or a divergence
    ratios.py       log-probabilities of the same tokens by three policies -> their ratios rho, r and s
    weights.py      ratios and advantages -> the factor of each token's log pi in the loss
    table.py        the presets: a name for each published combination

A new algorithm is one function in `weights.py` and one line in `table.py`.
"""
