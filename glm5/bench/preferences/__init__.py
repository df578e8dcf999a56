"""A reward model and DPO on generated pairs whose true scores, label noise and optimum are known."""
