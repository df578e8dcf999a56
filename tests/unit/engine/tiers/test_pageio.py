"""Pages of a real cache survive the way through memory and files bit for bit, all layers together."""

import numpy as np
import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.tiers import CopyQueue, DiskTier, HostTier, layout_of, page_io, page_key
from tests.unit.engine.tiers.pages import PATIENCE_S

CFG = preset("tiny")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


LAYOUTS = ["auto", "fp8_key", "fp8"]


def random_cache(dtype: torch.dtype, device: str, layout: str, seed: int) -> KVCache:
    cache = KVCache(CFG, 11, dtype=dtype, device=device, layout=layout, mtp=True)
    gen = torch.Generator().manual_seed(seed)
    for part in cache.parts().values():
        part.copy_(torch.randn(part.shape, generator=gen))
    return cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_page_survives_memory_and_disk(tmp_path, dtype, kv_layout, device, seed):
    cache = random_cache(dtype, device, kv_layout, seed)
    parts = {name: part.view(torch.uint8) for name, part in cache.parts().items()}
    layout = layout_of(cache.parts(), {"weights": "x"})
    assert layout.num_bytes == KVCache.bytes_per_page(CFG, dtype, kv_layout, mtp=True)
    before = {name: part.clone() for name, part in parts.items()}
    keys = [page_key(None, [i] * cache.page_size, b"") for i in range(12)]
    for expected in ("host", "disk"):
        host = HostTier(16 * layout.num_bytes, layout, pin=device == "cuda")
        with CopyQueue(page_io(cache.parts()), host, DiskTier(tmp_path, 1 << 26, layout)) as queue:
            if expected == "host":
                assert all(queue.store(key, i) for i, key in enumerate(keys))
                assert queue.flush(PATIENCE_S)
                queue.done()
            for part in parts.values():
                part.zero_()
            # Each page comes back as its neighbour.
            assert all(queue.load(key, (i + 1) % 12) for i, key in enumerate(keys))
            assert queue.flush(PATIENCE_S)
            assert {copy.tier for copy in queue.done()} == {expected}
        for name, part in parts.items():
            assert torch.equal(part, before[name].roll(1, 0))
            part.copy_(before[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_of_the_cache_is_one_copy(layout, monkeypatch, seed):
    cache = random_cache(torch.float32, "cpu", layout, seed)
    io, block = page_io(cache.parts()), torch.empty(layout_of(cache.parts(), {}).num_bytes, dtype=torch.uint8)
    copies, copyto = [], np.copyto
    monkeypatch.setattr(np, "copyto", lambda *args: copies.append(1) or copyto(*args))
    io.read_page(3, block, io.fence())
    io.write_page(5, block, io.fence())
    assert len(copies) == 2
    for part in cache.parts().values():
        assert torch.equal(part[5].view(torch.uint8), part[3].view(torch.uint8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", ["ab", "abc", "ba", "ac", "cab"])
def test_pages_of_a_pool_that_keeps_the_layers_of_a_page_together(names, device):
    """Parts may be pieces of larger rows; neighbours among them travel as one."""
    pool = torch.arange(5 * 4 * 9, dtype=torch.float32, device=device).view(5, 36)
    ends = {"a": (0, 16), "b": (16, 24), "c": (24, 32)}
    parts = {name: pool[:, start:end].unflatten(1, (4, -1)) for name, (start, end) in ends.items()}
    parts = {name: parts[name] for name in names}
    before, layout = pool.clone(), layout_of(parts, {})
    io, block = page_io(parts), torch.empty(layout.num_bytes, dtype=torch.uint8)
    io.read_page(3, block, io.fence())
    assert torch.equal(block.view(torch.float32), torch.cat([parts[name][3].flatten() for name in names]).cpu())
    io.write_page(1, block, io.fence())
    for name, (start, end) in ends.items():
        before[1, start:end] = before[3, start:end] if name in names else before[1, start:end]
    assert torch.equal(pool, before)


def test_pages_that_were_made_in_inference_mode_can_be_written():
    with torch.inference_mode():
        parts = {"a": torch.zeros(3, 4, 2)}
    block = torch.ones(32, dtype=torch.uint8)
    page_io(parts).write_page(1, block, None)
    assert parts["a"].view(torch.uint8)[1].eq(1).all()
    assert parts["a"][0].eq(0).all()


def test_layouts_of_different_dtypes_and_shapes_have_different_fingerprints():
    shapes = [
        ((3, 4, 2), torch.float32),
        ((3, 4, 4), torch.bfloat16),
        ((3, 4, 2), torch.int32),
        ((3, 8, 1), torch.float32),
    ]
    layouts = [layout_of({"a": torch.zeros(shape, dtype=dtype)}, {}) for shape, dtype in shapes]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    # The number of pages is no part of what a page means.
    assert layout_of({"a": torch.zeros(9, 4, 2)}, {}) == layouts[0]
