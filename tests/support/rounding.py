"""How far two right computations of one model are apart in float32, on any processor, for tests' tolerances.

    sqrt(2 sides x products one after another x terms of each) x eps / 2        (of logits of unit scale)

Every partial sum of a product is rounded by up to eps / 2 of its size, up or down as it comes, and so is what the next
product makes of it; this is the standard deviation. A fault moves logits of random models by a hundredth of their
scale or more.
"""

import torch

from glm5.config.model import ModelConfig

DEVIATIONS = 6  # one value in 5e8 is further away
PRODUCTS = 9  # of a layer, one after another: q_a, q_b, into latents, scores, values, out of latents, o, gate_up, down


def logit_rounding(cfg: ModelConfig, temperature: float = 1.0) -> float:
    """Of a logit of unit scale over `temperature`, or of its log-probability, in float32."""
    terms = max(cfg.hidden_size, cfg.intermediate_size, cfg.q_lora_rank, cfg.num_attention_heads * cfg.v_head_dim)
    products = PRODUCTS * cfg.num_hidden_layers + 1
    return DEVIATIONS * (2 * products * terms) ** 0.5 * torch.finfo(torch.float32).eps / 2 / temperature
