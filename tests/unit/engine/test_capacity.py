"""The cache that is planned is the cache that fits."""

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.config.presets import preset
from glm5.engine.cache.capacity import plan_cache, planned_length, workspace_bytes
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache

CFG = preset("tiny")
LAYOUTS = ["auto", "fp8_key", "fp8"]


def plan(pages: float, layout: str = "auto", *, mtp: bool = False, length: int | None = None, num_seqs: int = 64):
    """The plan for memory of so many pages."""
    memory = int(pages * KVCache.bytes_per_page(CFG, torch.float32, layout, mtp=mtp))
    return plan_cache(CFG, torch.float32, layout, mtp=mtp, max_model_len=length, max_num_seqs=num_seqs, memory=memory)


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_fits_in_memory_to_the_page(layout, mtp):
    for pages in (2, 5, 5.999):
        length, num_pages = plan(pages, layout, mtp=mtp)
        assert num_pages == int(pages) - 1  # the dump page is one more
        assert length == num_pages * PAGE_SIZE


def test_no_more_pages_than_sequences_can_fill():
    assert plan(10**6, length=100, num_seqs=3) == (100, 6)
    assert plan(10**6, num_seqs=2) == (CFG.max_position_embeddings, 2 * CFG.max_position_embeddings // PAGE_SIZE)


def test_fp8_holds_more():
    memory = 10**6
    pages = [
        plan_cache(CFG, torch.float32, layout, max_model_len=64, max_num_seqs=10**6, memory=memory)[1]
        for layout in LAYOUTS
    ]
    assert pages == sorted(set(pages))


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"max_model_len: 129 tokens take .* allowed here: up to 128$"):
        plan(3, length=129)


@pytest.mark.parametrize("pages", [0, 0.5, 1.5])
@pytest.mark.parametrize("length", [None, 1])
def test_memory_for_no_page_at_all(pages, length):
    refused = (
        r"the cache: [\d,]+ bytes are free for it, and a page of 64 tokens, .* takes [\d,]+; raise kv_cache_memory"
    )
    with pytest.raises(ConfigError, match=refused):
        plan(pages, length=length)


def test_pages_that_were_given_hold_one_request():
    assert [planned_length(CFG, length, 2) for length in (1, 127, 128, None)] == [1, 127, 128, 128]
    assert planned_length(CFG, None, 10**6) == CFG.max_position_embeddings
    refused = (
        r"num_gpu_blocks_override: got 2, pages for 128 tokens; allowed: at least 3, for one .* max_model_len 129$"
    )
    with pytest.raises(ConfigError, match=refused):
        planned_length(CFG, 129, 2)
    with pytest.raises(ConfigError, match="the model's longest context"):
        planned_length(CFG, CFG.max_position_embeddings + 1, 10**6)


def test_lengths_and_counts_that_are_none():
    with pytest.raises(ConfigError, match="max_model_len: got 2000; allowed: up to 1024"):
        plan(100, length=2000)
    for bad in (0, True, 2.0):
        with pytest.raises(ConfigError, match="max_num_seqs: got"):
            plan(100, num_seqs=bad)


def test_workspace_of_glm5_is_a_few_gibibytes():
    """Absorbed weights are shared out over ranks, logits of their part of the vocabulary too."""
    sizes = {"num_tokens": 2048, "num_seqs": 128, "depth": 3}
    alone, of_eight = (workspace_bytes(preset("glm-5"), torch.bfloat16, **sizes, ranks=ranks) for ranks in (1, 8))
    assert 4 * 2**30 < alone < 8 * 2**30
    assert 2 * 2**30 < of_eight < 4 * 2**30
