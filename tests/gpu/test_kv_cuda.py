"""The cache on a GPU: bytes as on the CPU, the same logits over each layout, memory that goes back to the device."""

import pytest
import torch

from glm5.config.presets import preset
from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.tiers import layout_of, page_io
from glm5.kernels.fp8_pool import LatentFormat, quantize_keys, quantize_latents
from glm5.testing.numerics import rel_rms
from tests.support.cached import CachedRun
from tests.support.models import random_model

pytestmark = pytest.mark.gpu

TINY = preset("tiny")
LAYOUTS = ["auto", "fp8_key", "fp8"]
# float32: the same sums in another order, 6e-7 measured on an H200. Over FP8, a value on a midpoint may be rounded the
# other way: 5e-6.
FLOAT32, FP8 = 1e-5, 3e-3


@pytest.mark.parametrize("width", [40, 576])
def test_rows_are_rounded_to_the_same_bytes(width, seed):
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randn(500, width, generator=gen) * torch.logspace(-6, 4, 500)[:, None]
    form = LatentFormat(width * 8 // 9 // 8 * 8, width - width * 8 // 9 // 8 * 8)
    for x in (rows, rows.bfloat16()):
        assert torch.equal(quantize_latents(x.cuda(), form).cpu(), quantize_latents(x, form))
        for got, want in zip(quantize_keys(x.cuda()), quantize_keys(x), strict=True):
            assert torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_the_cpus(layout, seed):
    """All keys read and all experts run, so that nothing can jump; prompts in chunks, then together token by token."""
    smooth = TINY.replace(num_experts_per_tok=TINY.n_routed_experts, index_topk=150)
    gen = torch.Generator().manual_seed(seed)
    ids = [torch.randint(TINY.vocab_size, (n,), generator=gen).tolist() for n in (150, 20, 90)]
    runs = []
    for device in ("cpu", "cuda"):
        run = CachedRun(random_model(7, smooth).to(device), ids, layout)
        run.advance({0: 100, 1: 15}, num_padding=5)
        run.advance({2: 80, 0: 40}, num_padding=1)
        runs.append(run.finish(chunk=1))
    for i in range(len(ids)):
        error = rel_rms(runs[1].logits(i), runs[0].logits(i))
        print(f"{layout}: {error:.1e}")
        assert error < (FLOAT32 if layout != "fp8" else FP8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selections_equal_the_cpus(layout, seed):
    """Of the first layer, whose inputs are rounded alike; but for near-ties."""
    ids = [torch.randint(TINY.vocab_size, (150,), generator=torch.Generator().manual_seed(seed)).tolist()]
    here, there = (CachedRun(random_model(7).to(device), ids, layout).finish() for device in ("cpu", "cuda"))
    pairs = list(zip(here.selected[0][0], there.selected[0][0], strict=True))
    assert sum(len(a - b) for a, b in pairs) <= 0.005 * sum(len(a) for a, _ in pairs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_model(layout, seed):
    ids = [torch.randint(TINY.vocab_size, (90,), generator=torch.Generator().manual_seed(seed)).tolist()]
    run = CachedRun(random_model(7, dtype=torch.bfloat16).cuda(), ids, layout).finish(chunk=64)
    assert run.logits().isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_released_memory_is_the_devices_again(layout):
    per_page = KVCache.bytes_per_page(TINY, torch.bfloat16, layout, mtp=True)
    cache = KVCache(TINY, (1 << 30) // per_page, dtype=torch.bfloat16, device="cuda", layout=layout, mtp=True)
    parts = cache.parts()
    for part in parts.values():
        part.view(torch.uint8).fill_(7)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what others left
    full = torch.cuda.mem_get_info()[0]
    freed = cache.release_memory()
    assert torch.cuda.mem_get_info()[0] - full == pytest.approx(freed, rel=0.01)
    cache.restore_memory()
    for name, part in cache.parts().items():
        assert part.data_ptr() == parts[name].data_ptr()  # views from before see the memory from after
        assert not part.view(torch.uint8).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_page_is_one_copy_to_the_host_and_back(layout):
    cache = KVCache(TINY, 8, dtype=torch.bfloat16, device="cuda", layout=layout, mtp=True)
    for part in cache.parts().values():
        part.view(torch.uint8).random_(0, 255)
    block = torch.empty(layout_of(cache.parts(), {}).num_bytes, dtype=torch.uint8).pin_memory()
    io = page_io(cache.parts())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        io.read_page(3, block, io.fence())
        io.write_page(5, block, io.fence())
    on_device = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 2, on_device
    assert all("Memcpy" in name for name in on_device), on_device
    for part in cache.parts().values():
        assert torch.equal(part[5].view(torch.uint8), part[3].view(torch.uint8))
