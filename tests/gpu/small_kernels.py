"""Every kernel once, at short and ragged shapes, for tools that watch each access:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 -m tests.gpu.small_kernels
compute-sanitizer --tool racecheck python3 -m tests.gpu.small_kernels

Words after it choose some by name. Run it once without the tool: compiling under it takes long.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels.act_quant import act_quant
from glm5.kernels.add_rms_norm import add_rms_norm, add_rms_norm_quantized
from glm5.kernels.block_scaled import BlockScaled, quantize_blocks
from glm5.kernels.fp8_linear import fp8_linear
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, LatentFormat, Pool, quantize_keys, quantize_latents
from glm5.kernels.mla_keys import IndexKeys, mla_keys_quantized
from glm5.kernels.mla_queries import mla_queries
from glm5.kernels.mla_values import mla_values_quantized
from glm5.kernels.prompt_attention import prompt_attention
from glm5.kernels.rms_norm import rms_norm
from glm5.kernels.rope import rope, rope_table
from glm5.kernels.router import router
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.store_rows import store_rows
from glm5.kernels.top_k import top_k
from tests.support.experts import make_experts

C, R, J, I, Z = 512, 64, 32, 128, 64
FORM = LatentFormat(C, R)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def products() -> None:
    for T in (1, 3, 9, 40):
        for O, D in ((130, 300), (576, 2048)):
            weight = quantize_blocks(torch.randn(O, D) * 0.02)
            fp8_linear(rows(T, D), BlockScaled(weight.data.cuda(), weight.scale.cuda()), impl="triton")
    for T in (1, 5):
        router(rows(T, 1024), rows(256, 1024), torch.zeros(256, device="cuda"), top_k=8, n_group=1, topk_group=1,
               norm_topk_prob=True, scaling_factor=2.5, impl="triton")  # fmt: skip


def experts() -> None:
    from glm5.kernels.grouped_experts.triton import Tiling, grouped_experts

    ways = {
        1: [Tiling("vector", 4, 2, 8), Tiling("vector", 2, 4, 8, up_tiles=2)],
        9: [Tiling("pairs", 64, 4, 64, down_tiles=8)],
        40: [
            Tiling("tiles", 128, 8, 128, 8, down_tiles=8, block_t=16),
            Tiling("rows", 128, 8, 64, 4, down_tiles=16, block_t=128, down_t=64),
        ],
        170: [Tiling("rows", 128, 8, 64, 4, down_tiles=16, block_t=128, down_t=64)],
    }
    for T, tilings in ways.items():
        case = make_experts(T, 6, 2, 200, 136, torch.Generator().manual_seed(T)).to("cuda", torch.bfloat16)
        for tiling in tilings:
            grouped_experts(*case[:5], case.shared, tiling)


def rows_of_models() -> None:
    x, residual, weight = rows(3, 6144), rows(3, 6144), rows(6144)
    act_quant(rows(5, 300), impl="triton")
    rms_norm(x, weight, 1e-5, impl="triton")
    add_rms_norm(x, residual, weight, 1e-5, impl="triton")
    add_rms_norm_quantized(x, residual, weight, 1e-5, impl="triton")
    rope(rows(3, 8, 256)[..., -R:], *rope_table(torch.arange(3, device="cuda"), R, 1e6, torch.bfloat16), impl="triton")


def pools(kind: str, pages: int) -> tuple[Pool, Pool]:
    latents, keys = rows(pages, Z, C + R), rows(pages, Z, I)
    if kind == "bf16":
        return latents, keys
    data, scale = (x.unflatten(0, (pages, Z)) for x in quantize_keys(keys.flatten(0, 1)))
    return Fp8Latents(quantize_latents(latents.flatten(0, 1), FORM).unflatten(0, (pages, Z)), FORM), Fp8Keys(
        data, scale
    )


def preparation() -> None:
    for kind in ("bf16", "fp8"):
        latents, keys = pools(kind, 3)
        for T in (1, 70):
            table = rope_table(torch.arange(T, device="cuda"), R, 1e6, torch.bfloat16)
            slot = torch.randperm(3 * Z, device="cuda")[:T]
            index = IndexKeys(rows(T, I), rows(I), rows(I), 1e-6, keys)
            mla_keys_quantized(rows(T, 2048 + C + R), rows(2048), rows(C), 1e-5, *table, slot, latents, index)
            mla_queries(rows(T, 8, 256), rows(8, 192, C), *table, impl="triton")
            mla_values_quantized(rows(T, 8, C), rows(8, C, 256), impl="triton")
            store_rows(latents, slot, rows(T, C + R), impl="triton")


def attention() -> None:
    ends = (1, 63, 65, 300, 0)
    table = torch.randperm(5 * 6, device="cuda").int().view(5, 6)
    row = torch.arange(5, device="cuda", dtype=torch.int32)
    end = torch.tensor(ends, device="cuda", dtype=torch.int32)
    prompt = torch.zeros(70, device="cuda", dtype=torch.int32), torch.arange(1, 71, device="cuda", dtype=torch.int32)
    for kind in ("bf16", "fp8"):
        latents, _ = pools(kind, 30)
        chosen = torch.arange(200, device="cuda", dtype=torch.int32).expand(5, -1).contiguous()
        for keys in (chosen, None):
            sparse_mla(rows(5, 8, C + R), latents, keys, table, row, end, scale=0.06, value_dim=C, impl="triton")
            if kind == "bf16":
                sparse_mla(rows(5, 8, C + R), latents, keys, table, row, end, scale=0.06, value_dim=C, impl="cuda")
        opts = {"scale": 0.06, "value_dim": C}
        sparse_mla(rows(70, 8, C + R), latents, None, table[:1], *prompt, **opts, impl="triton")
    first = torch.zeros(70, device="cuda", dtype=torch.int32)
    prompt_attention(rows(70, 8, 256), rows(70, 8, 192), rows(70, R), rows(70, 8, 256), first, scale=0.06)


def selection() -> None:
    from glm5.kernels.select_keys.triton import select_keys

    table = torch.randperm(30, device="cuda").int().view(5, 6)
    where = [torch.tensor(x, device="cuda", dtype=torch.int32) for x in ((0, 1, 2, 3, 4), (1, 63, 65, 300, 0))]
    prompt = [torch.zeros(70, device="cuda", dtype=torch.int32), torch.arange(1, 71, device="cuda", dtype=torch.int32)]
    for kind in ("bf16", "fp8"):
        _, keys = pools(kind, 30)
        for rest in ({}, {"longest": 100, "num_groups": 100}):
            select_keys(rows(5, J, I), keys, rows(5, J), table, *where, top_k=50, scale=0.09, **rest)
        select_keys(rows(70, J, I), keys, rows(70, J), table[:1], *prompt, top_k=50, scale=0.09)
    for T, S in ((2, 300), (2, 9000)):
        top_k(torch.randn(T, S, device="cuda"), 100, impl="triton")


PARTS: tuple[Callable[[], None], ...] = (products, experts, rows_of_models, preparation, attention, selection)


if __name__ == "__main__":
    torch.manual_seed(1)
    for part in PARTS:
        if len(sys.argv) == 1 or part.__name__ in sys.argv[1:]:
            part()
            torch.cuda.synchronize()
            print(part.__name__, "ran")
