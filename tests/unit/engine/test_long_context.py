"""What a token costs as its context grows to 64k: the indexer in proportion, attention nothing more.

Costs are counted, not timed: bytes of all that operations make, which is what they take time for here.
"""

from itertools import pairwise

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache
from tests.support.dispatch import largest_result

CFG = preset("tiny").replace(num_hidden_layers=1, index_topk_pattern="F")
LAYOUTS = ["auto", "fp8_key", "fp8"]
CONTEXTS = [2048, 8192, 32768]
LONGEST = 65536
MIB = 1 << 20
TABLE = 16  # bytes a page that may be spent on the page table, in whatever integers


@pytest.fixture(scope="module", params=LAYOUTS)
def cache(request) -> KVCache:
    return KVCache(CFG, LONGEST // PAGE_SIZE, dtype=torch.float32, layout=request.param)


class Costs:
    """Selection and attention of the last `num_queries` tokens of a context, over empty keys that lie anywhere."""

    def __init__(self, cache: KVCache, context: int, num_queries: int, impl: str):
        self.context, gen = context, torch.Generator().manual_seed(context)
        q_TJI = torch.randn(num_queries, CFG.index_n_heads, CFG.index_head_dim, generator=gen)
        w_TJ = torch.randn(num_queries, CFG.index_n_heads, generator=gen)
        q_THL = torch.randn(
            num_queries, CFG.num_attention_heads, CFG.kv_lora_rank + CFG.qk_rope_head_dim, generator=gen
        )
        slot_T = torch.arange(LONGEST)
        cache.append_index_key(0, slot_T, torch.randn(len(slot_T), CFG.index_head_dim, generator=gen))
        table = torch.randperm(cache.num_pages, generator=gen)[: context // PAGE_SIZE].int().view(1, -1)
        end_T = torch.arange(context - num_queries, context, dtype=torch.int32) + 1
        where = table, torch.zeros(num_queries, dtype=torch.int32), end_T
        with torch.inference_mode():
            with largest_result() as self.select:
                keys_TK = cache.select_keys(0, q_TJI, w_TJ, *where, top_k=CFG.index_topk, scale=0.25, impl=impl)
            with largest_result() as self.attend:
                cache.attend(0, q_THL, keys_TK, *where, scale=0.2, value_dim=CFG.kv_lora_rank, impl=impl)


@pytest.mark.parametrize("impl", ["auto", "invariant"])
@pytest.mark.parametrize("num_queries", [1, 16])
def test_selection_grows_with_the_context_and_attention_does_not(cache, num_queries, impl):
    costs = [Costs(cache, context, num_queries, impl) for context in CONTEXTS]
    for before, after in pairwise(costs):
        assert 3 < after.select.total_bytes / before.select.total_bytes < 4.1
        more_pages = (after.context - before.context) // PAGE_SIZE
        assert after.attend.total_bytes - before.attend.total_bytes <= TABLE * more_pages


def test_a_prompt_chunk_takes_bounded_memory(cache):
    """256 queries at 64k: 64 MiB of scores, and 1 GiB of products of heads, if they were all made at once."""
    cost = Costs(cache, LONGEST, 256, "auto")
    assert cost.select.num_bytes <= 16 * MIB, cost.select
    assert cost.attend.num_bytes <= 4 * MIB, cost.attend
    assert cost.select.total_bytes > 1024 * MIB  # the control: they were made, piece by piece
