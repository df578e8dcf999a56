"""GLM-5 on one device: single-device math, no ranks, no caches, no quantization recipes, no training loop.

Shape letters, used as suffixes in the whole package:

    T tokens (packed queries)   S keys in context       B requests            D hidden_size
    H attention heads           Q q_lora_rank           C kv_lora_rank        N qk_nope_head_dim
    R qk_rope_head_dim          X = N + R               V v_head_dim          L = C + R latent row
    J index_n_heads             I index_head_dim        K index_topk          E n_routed_experts
    A num_experts_per_tok       F moe_intermediate_size M intermediate_size   W vocab_size
    P pages                     Z page size             O, I output and input features of a linear layer
    G rows sorted by expert     Y request slots of an engine    U entries of a list of a request

A shard keeps its letter, and so does a subset.

A suffix names a dtype only when it differs from the model's (`_f32`, `_fp8`). Everything that varies between
training, inference, quantized and parallel runs enters at the seams of `seams.py`.
"""

from glm5.model.glm5 import Glm5

__all__ = ["Glm5"]
