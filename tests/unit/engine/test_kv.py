"""The pool of pages: sizes to the byte, and memory that comes and goes."""

from pathlib import Path

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache
from tests.support.cached import CachedRun
from tests.support.models import random_model

TINY, NANO = preset("tiny"), preset("nano")
LAYOUTS = ["auto", "fp8_key", "fp8"]


@pytest.mark.parametrize(
    ("name", "mtp", "layout", "per_token"),
    [
        ("glm-5", True, "auto", 79 * (1152 + 256)),
        ("glm-5", True, "fp8_key", 79 * (1152 + 132)),
        ("glm-5", True, "fp8", 62_252),  # 79 * (656 + 132)
        ("glm-5", False, "fp8_key", 100_152),  # as published for 78 layers
        ("glm-5", False, "fp8", 61_464),
        ("glm-5.2", True, "fp8", 54_728),  # 79 * 656 + 22 * 132: 21 of 78 layers have an indexer, and the MTP layer
        ("glm-5.2", True, "auto", 79 * 1152 + 22 * 256),
    ],
)
def test_bytes_of_published_models(name, mtp, layout, per_token):
    assert KVCache.bytes_per_page(preset(name), torch.bfloat16, layout, mtp=mtp) == per_token * PAGE_SIZE


@pytest.mark.parametrize("mtp", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_page_takes_what_it_says(dtype, layout, mtp):
    cache = KVCache(TINY, 3, dtype=dtype, layout=layout, mtp=mtp)
    per_page = KVCache.bytes_per_page(TINY, dtype, layout, mtp=mtp)
    parts = cache.parts()
    assert sum(part.nbytes for part in parts.values()) == 4 * per_page
    (storage,) = {part.untyped_storage().data_ptr() for part in parts.values()}
    assert next(iter(parts.values())).untyped_storage().nbytes() == 4 * per_page
    expected = 0  # parts lie in a page in their order, without gaps, each where a GPU can load 16 bytes at once
    for part in parts.values():
        assert part.shape[:2] == (4, PAGE_SIZE)
        assert part.data_ptr() - storage == expected
        assert expected % 16 == 0
        assert part.stride(0) * part.element_size() == per_page
        assert part[0].is_contiguous()
        expected += part[0].nbytes
    layers = [name.removeprefix("index_key.") for name in parts if name.startswith("index_key.")]
    assert layers == (["0", "1", "3", "4"] if mtp else ["0", "1", "3"])  # layer 2 shares layer 1's selection
    assert len([name for name in parts if name.startswith("latent.")]) == TINY.num_hidden_layers + mtp


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_copied_whole_and_in_order(layout, seed):
    cache = KVCache(TINY, 5, dtype=torch.float32, layout=layout, mtp=True)
    gen = torch.Generator().manual_seed(seed)
    for part in cache.parts().values():
        part.view(torch.uint8).random_(0, 255, generator=gen)
    before = {name: part.view(torch.uint8).clone() for name, part in cache.parts().items()}
    cache.copy_pages([(0, 3), (3, 1), (2, 0)])
    for name, part in cache.parts().items():
        assert torch.equal(part.view(torch.uint8), before[name][[2, 0, 2, 0, 4, 5]])
    cache.copy_pages([(1, 2), (1, 4), (0, 5)])  # in any order, at once
    for name, part in cache.parts().items():
        assert torch.equal(part.view(torch.uint8), before[name][[2, 0, 0, 0, 0, 2]])


HUGE_PAGES = 4 << 20  # Linux may give 2 MiB where one byte is written; here in two places


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's count of resident pages")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_released_memory_is_the_systems_again(layout):
    per_page = KVCache.bytes_per_page(NANO, torch.float32, layout, mtp=True)
    cache = KVCache(NANO, (64 << 20) // per_page, dtype=torch.float32, layout=layout, mtp=True)
    parts = cache.parts()
    for part in parts.values():
        part.view(torch.uint8).fill_(7)
    full = resident_bytes()
    freed = cache.release_memory()
    assert freed == sum(part.nbytes for part in parts.values())
    assert full - resident_bytes() == pytest.approx(freed, rel=0.03)
    cache.restore_memory()
    for name, part in cache.parts().items():
        assert part.data_ptr() == parts[name].data_ptr()  # what holds on to parts, such as a tier, need not know
        assert not part.view(torch.uint8).any()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux hands memory out when it is written to")
def test_memory_that_nobody_wrote_to_was_never_taken():
    cache = KVCache(NANO, 1000, dtype=torch.float32, mtp=True)
    per_page = KVCache.bytes_per_page(NANO, torch.float32, mtp=True)
    for part in cache.parts().values():
        part[100:300].fill_(7)
    freed = cache.release_memory()
    assert 200 * per_page <= freed < 200 * per_page + HUGE_PAGES
    cache.restore_memory()
    assert cache.release_memory() < HUGE_PAGES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_after_waking_up_the_pool_is_as_good_as_new(layout):
    run = CachedRun(random_model(7), [list(range(70))], layout).finish()
    cache = run.cache
    cache.release_memory()
    with pytest.raises((AssertionError, IndexError)):
        cache.append_latent(0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 40))
    assert cache.release_memory() == 0
    cache.restore_memory()
    with pytest.raises(AssertionError, match="nothing was released"):
        cache.restore_memory()
    before = run.logits()
    run.restart()
    assert torch.equal(run.finish().logits(), before)
