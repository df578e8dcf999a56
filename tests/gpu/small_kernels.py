"""Every kernel once, at short and ragged shapes, for tools that watch each access:

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python3 -m tests.gpu.small_kernels
compute-sanitizer --tool racecheck python3 -m tests.gpu.small_kernels

Words after it choose some by name (each in a process of its own is faster). Run it once without the tool: compiling
under it takes long.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from glm5.kernels.act_quant import act_quant
from glm5.kernels.add_rms_norm import add_rms_norm, add_rms_norm_quantized
from glm5.kernels.best_token import best_token
from glm5.kernels.block_scaled import BlockScaled, quantize_blocks
from glm5.kernels.commit_tokens import CommittedTokens, commit_tokens
from glm5.kernels.fp8_linear import cuda_rows, fp8_linear
from glm5.kernels.fp8_pool import Fp8Keys, Fp8Latents, LatentFormat, Pool, quantize_keys, quantize_latents
from glm5.kernels.gptq_block import gptq_block
from glm5.kernels.index_kl import index_kl
from glm5.kernels.mla_keys import IndexKeys, PlainLatents, mla_keys_quantized
from glm5.kernels.mla_queries import mla_queries
from glm5.kernels.mla_values import mla_values_quantized
from glm5.kernels.prompt_attention import prompt_attention, prompt_attention_quantized
from glm5.kernels.quantized_experts import quantized_experts
from glm5.kernels.quantized_linear import quantized_linear
from glm5.kernels.quantized_weight import QuantizedWeight
from glm5.kernels.rms_norm import rms_norm
from glm5.kernels.rope import rope, rope_table
from glm5.kernels.router import router
from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.ssz import ssz
from glm5.kernels.step_rows import step_rows
from glm5.kernels.store_rows import store_rows
from glm5.kernels.swiglu import swiglu, swiglu_backward, swiglu_quantized
from glm5.kernels.top_k import top_k
from glm5.kernels.weighted_rows import weighted_rows
from tests.support.experts import make_experts
from tests.support.quantized_weights import FORMS, quantized_case, random_quantized

C, R, J, I, Z = 512, 64, 32, 128, 64
FORM = LatentFormat(C, R)


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def products() -> None:
    for T in (1, 3, 9, 40):
        for O, D in ((130, 300), (576, 2048)):
            weight = quantize_blocks(torch.randn(O, D) * 0.02)
            fp8_linear(rows(T, D), BlockScaled(weight.data.cuda(), weight.scale.cuda()), impl="triton")
    for T in (1, 40, 128):
        weight = quantize_blocks(torch.randn(132, 1024) * 0.02)
        fp8_linear(rows(T, 1024), BlockScaled(weight.data.cuda(), weight.scale.cuda()), impl="cuda")
    for T in (1, 300):
        weight = quantize_blocks(torch.randn(512, 1536) * 0.02)
        cuda_rows.fp8_linear(rows(T, 1536), BlockScaled(weight.data.cuda(), weight.scale.cuda()))
    for T in (1, 5):
        router(rows(T, 1024), rows(256, 1024), torch.zeros(256, device="cuda"), top_k=8, n_group=1, topk_group=1,
               norm_topk_prob=True, scaling_factor=2.5, impl="triton")  # fmt: skip


def experts() -> None:
    from glm5.kernels.grouped_experts import cuda as prompts
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
            grouped_experts(*case[:5], case.shared, tiling=tiling)
    case = make_experts(230, 6, 2, 512, 256, torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    case.expert[:100] = torch.tensor([1, 4])
    prompts.grouped_experts(*case[:5], case.shared)


def rows_of_models() -> None:
    x, residual, weight = rows(3, 6144), rows(3, 6144), rows(6144)
    act_quant(rows(5, 300), impl="triton")
    rms_norm(x, weight, 1e-5, impl="triton")
    add_rms_norm(x, residual, weight, 1e-5, impl="triton")
    add_rms_norm_quantized(x, residual, weight, 1e-5, impl="triton")
    add_rms_norm_quantized(x, residual, weight, 1e-5, "int8", impl="triton")
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
            given = rows(T, 2048 + C + R), rows(2048), rows(C), 1e-5, *table, slot, latents, index
            mla_keys_quantized(*given, plain=PlainLatents(rows(T, C), rows(T, R)))
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
            sparse_mla(rows(5, 8, C + R), latents, keys, table, row, end, scale=0.06, value_dim=C, impl="cuda")
        opts = {"scale": 0.06, "value_dim": C}
        sparse_mla(rows(70, 8, C + R), latents, None, table[:1], *prompt, **opts, impl="triton")
    for T in (70, 400):  # of which the longer has two programs a tile
        first = torch.zeros(T, device="cuda", dtype=torch.int32)
        for impl in ("triton", "cuda"):
            given = rows(T, 2, 256), rows(T, 2, 192), rows(T, R), rows(T, 2, 256), first
            prompt_attention(*given, scale=0.06, impl=impl)
            prompt_attention_quantized(*given, scale=0.06, impl=impl)


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
        # As in a step: queries are rotated here, and those of attention made meanwhile.
        turns = rope_table(torch.arange(5, device="cuda"), R, 1e6, torch.bfloat16)
        q, w_k, early = rows(5, 8, 256), rows(8, 192, C), rows(5, 8, C + R)
        select_keys(rows(5, J, I), keys, rows(5, J), table, *where, top_k=50, scale=0.09, rotation=turns)
        mla_queries(q, w_k, *turns, early=early, impl="triton")
    for T, S in ((2, 300), (2, 9000)):
        top_k(torch.randn(T, S, device="cuda"), 100, impl="triton")


def steps() -> None:
    slots, sequences, pages = 5, 40, 99
    len_Y = torch.randint(2, 20, (slots,), device="cuda")
    token_YS = torch.randint(0, 1000, (slots, sequences), device="cuda")
    table_YP = torch.randint(0, pages, (slots, 4), device="cuda").int()
    for count in (1, 200):
        where = [torch.randint(low, high, (count,), device="cuda") for low, high in ((0, 5), (-1, 12), (0, 6), (0, 3))]
        step_rows(*where, len_Y, token_YS, table_YP, page_size=8, dump_page=pages, impl="triton")
    for depth in (0, 3):
        places = [(slot, offset) for slot in (0, 2, 3) for offset in range(depth + 1)] + [(slots - 1, 0)] * 3
        slot_T, offset_T = torch.tensor(places, device="cuda").T.contiguous()
        drafts_Y = torch.randint(0, 3, (slots, depth), device="cuda")
        token_T = torch.randint(0, 3, (len(places),), device="cuda")
        reported = CommittedTokens(
            *(torch.zeros(size, dtype=torch.int64, device="cuda") for size in ((4, depth + 1), 4, (4, depth)))
        )
        sampling_slot_B = torch.tensor([2, 0, 3, slots - 1], device="cuda")
        position_T = len_Y[slot_T] + offset_T
        commit_tokens(
            token_T, slot_T, offset_T, position_T, drafts_Y, sampling_slot_B, token_YS, len_Y, reported, impl="triton"
        )
    best_token(rows(6, 9001), impl="triton")


def quantized() -> None:
    gen = torch.Generator().manual_seed(1)
    for form in (FORMS[i] for i in (0, 2, 3, 5, 7)):
        for T in (1, 8, 70):
            case = quantized_case(T, 6, 2, 256, 128, form, gen).to("cuda", torch.bfloat16)
            quantized_experts(*case, impl="triton")
            if T <= 8 and form.weight == "int4":
                quantized_experts(*case, impl="cuda")
            weight = random_quantized(gen, form, 132, 384)
            weight = QuantizedWeight(weight.codes.cuda(), weight.scale.cuda(), form)
            quantized_linear(rows(T, 384), weight, impl="triton")
            if form == FORMS[0]:
                quantized_linear(rows(T, 384), weight, impl="cuda")


def quantization() -> None:
    for grid in ((2, 130, 1, 300), (2, 9, 5, 128)):
        for h in (None, torch.rand(2, *grid[2:], device="cuda")):
            found = {"quant_min": -8, "quant_max": 7, "starts": (1.0, 0.5), "steps": 2, "refine": 2}
            ssz(torch.randn(grid, device="cuda"), h, **found, impl="triton")
    for width, fp8 in ((128, False), (70, True)):
        factor = torch.randn(3, width, width, device="cuda").triu() + 9 * torch.eye(width, device="cuda")
        for columns in (1, width):
            scale, w = torch.rand(3, 130, columns, device="cuda") + 0.1, torch.randn(3, 130, width, device="cuda")
            gptq_block(w, factor, scale, quant_min=-8, quant_max=7, fp8=fp8, impl="triton")


def training() -> None:
    lengths = (1, 70, 133)
    end = torch.cat([torch.arange(1, n + 1) for n in lengths]).int().cuda()
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().cuda()
    where = torch.arange(len(lengths), dtype=torch.int32, device="cuda")[:, None], row, end
    keys = torch.rand(len(end), max(lengths), device="cuda").argsort(dim=1)[:, :50].int()
    keys = keys.masked_fill(keys >= end[:, None], -1)
    for heads in (64, 6):
        q = rows(len(end), heads, C + R).requires_grad_()
        pool = rows(len(lengths), max(lengths), C + R).requires_grad_()
        served = []
        for in_order in (False, True):
            torch.use_deterministic_algorithms(mode=in_order)
            out, lse = sparse_mla(q, pool, keys, *where, scale=0.05, value_dim=C, impl="trained")
            out.sum().backward()
            torch.use_deterministic_algorithms(mode=False)
            served = [(q.detach(), pool.detach(), lse.detach())]
        for selected in (keys, None):
            leaves = [rows(len(end), J, I), rows(len(lengths), max(lengths), I), rows(len(end), J).float()]
            made = [leaf.requires_grad_() for leaf in leaves]
            index_kl(*made, served, selected, *where, index_scale=0.09, scale=0.05, impl="triton").backward()
    x, weight = rows(9, 6144).requires_grad_(), rows(6144).requires_grad_()
    rms_norm(x, weight, 1e-5, impl="trained").sum().backward()
    swiglu(rows(9, 600), impl="triton")
    for kind in ("blocks", "int8"):
        swiglu_quantized(rows(9, 600), kind, impl="triton")
    swiglu_backward(rows(9, 600), rows(9, 300), torch.rand(9, device="cuda"), impl="triton")
    slot_TA = torch.randint(0, 9, (5, 2), device="cuda")
    for weight_TA in (torch.rand(5, 2, device="cuda"), None):
        weighted_rows(rows(9, 300), slot_TA, weight_TA, impl="triton")


PARTS: tuple[Callable[[], None], ...] = (
    products,
    experts,
    rows_of_models,
    preparation,
    attention,
    selection,
    steps,
    quantized,
    quantization,
    training,
)


if __name__ == "__main__":
    torch.manual_seed(1)
    for part in PARTS:
        if len(sys.argv) == 1 or part.__name__ in sys.argv[1:]:
            part()
            torch.cuda.synchronize()
            print(part.__name__, "ran")
