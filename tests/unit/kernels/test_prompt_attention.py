"""Attention among the tokens of a pass: the definition against one query at a time and against sparse_mla, Triton's
implementation (under its interpreter where there is no GPU) against the definition in float64."""

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.prompt_attention import prompt_attention, prompt_attention_quantized
from glm5.kernels.sparse_mla import sparse_mla
from glm5.testing.numerics import rel_rms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
H, N, R, V, C, SCALE = 2, 24, 8, 20, 12, 0.2
# (tokens of each request, padding rows behind them)
CASES = {"one token": ([1], 0), "ragged": ([5, 20, 1], 3), "a tile and more": ([33], 1), "nothing": ([], 2)}
BUDGET = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3}  # measured 2e-16, 1.3e-7, 2.4e-4


def make_case(name: str, gen: torch.Generator, dtype: torch.dtype):
    lengths, padding = CASES[name]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    first = [start for start, length in zip(starts, lengths, strict=True) for _ in range(length)]
    num_tokens = len(first) + padding
    first_T = torch.tensor(first + [num_tokens] * padding, dtype=torch.int32)
    q, kv, rope = (torch.randn(num_tokens, *s, generator=gen).to(dtype) for s in [(H, N + R), (H, N + V), (R,)])
    return q, kv[..., :N], rope, kv[..., N:], first_T


def errors(got, want) -> float:
    seen = want[1].isfinite()
    assert torch.equal(got[1].isfinite().cpu(), seen)
    assert (got[0].cpu()[~seen] == 0).all()
    return max(rel_rms(got[0].cpu(), want[0]), rel_rms(got[1].cpu()[seen], want[1][seen]))


@pytest.mark.parametrize("name", CASES)
def test_the_definition(name, gen):
    q, k, rope, v, first = make_case(name, gen, torch.float64)
    out, lse = prompt_attention(q, k, rope, v, first, scale=SCALE)
    for t, start in enumerate(first.tolist()):
        for h in range(H):
            keys = torch.cat([k[start : t + 1, h], rope[start : t + 1]], dim=-1)
            logits = keys @ q[t, h] * SCALE
            assert rel_rms(out[t, h], logits.softmax(0) @ v[start : t + 1, h]) < BUDGET[torch.float64]
            assert torch.allclose(lse[t, h], logits.logsumexp(0))


def test_is_absorbed_attention_expanded(gen):
    """With k = latent Wk and v = latent Wv, queries absorbed into latents give the same."""
    latent = torch.randn(12, C + R, generator=gen, dtype=torch.float64)
    w_k, w_v = (torch.randn(H, width, C, generator=gen, dtype=torch.float64) for width in (N, V))
    q = torch.randn(12, H, N + R, generator=gen, dtype=torch.float64)
    k, v = (torch.einsum("tc,hnc->thn", latent[:, :C], w) for w in (w_k, w_v))
    got, lse = prompt_attention(q, k, latent[:, C:], v, torch.zeros(12, dtype=torch.int32), scale=SCALE)
    absorbed = torch.cat([torch.einsum("thn,hnc->thc", q[..., :N], w_k), q[..., N:]], dim=-1)
    where = torch.arange(3).view(1, 3), torch.zeros(12, dtype=torch.int32), torch.arange(12) + 1
    want = sparse_mla(absorbed, latent.view(3, 4, C + R), None, *where, scale=SCALE, value_dim=C, impl="gather")
    assert rel_rms(got, torch.einsum("thc,hvc->thv", want[0], w_v)) < BUDGET[torch.float64]
    assert rel_rms(lse, want[1]) < BUDGET[torch.float64]


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_quantized(impl, gen):
    *case, first = make_case("ragged", gen, torch.float16)
    at = [x.to(DEVICE) for x in (*case, first)]
    out, codes, scale = prompt_attention_quantized(*at, scale=SCALE, impl=impl)
    assert torch.equal(out, prompt_attention(*at, scale=SCALE, impl=impl)[0].flatten(1))
    for own, want in zip((codes, scale), act_quant(out), strict=True):
        assert torch.equal(own.float(), want.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_triton(name, dtype, gen):
    case = make_case(name, gen, dtype)
    want = prompt_attention(*(x.double() for x in case[:4]), case[4], scale=SCALE, impl="reference")
    at = [x.to(DEVICE) for x in case]
    assert errors(prompt_attention(*at, scale=SCALE, impl="triton"), want) < BUDGET[dtype]
    wrong = prompt_attention(*at, scale=1.01 * SCALE, impl="triton")  # the control
    assert len(CASES[name][0]) == 0 or errors(wrong, want) > 3 * BUDGET[torch.float32]


@pytest.mark.parametrize("name", ["WIDE", "NARROW", "SMALL"])
def test_every_tiling(name, gen):
    triton = pytest.importorskip("glm5.kernels.prompt_attention.triton")
    case = make_case("a tile and more", gen, torch.float16)
    want = prompt_attention(*(x.double() for x in case[:4]), case[4], scale=SCALE, impl="reference")
    at = [x.to(DEVICE) for x in case]
    got = triton.prompt_attention(*at, scale=SCALE, tiling=getattr(triton, name))
    assert errors(got, want) < BUDGET[torch.float16]


def test_what_is_refused(gen):
    q, k, rope, v, first = make_case("ragged", gen, torch.float32)
    with pytest.raises(ValueError, match=r"prompt_attention\[triton\] needs v_THV with rows in one piece"):
        prompt_attention(q, k, rope, v.transpose(1, 2).contiguous().transpose(1, 2), first, scale=SCALE, impl="triton")
    with pytest.raises(ValueError, match="unknown impl 'fast', expected one of auto, cuda, triton, reference"):
        prompt_attention(q, k, rope, v, first, scale=SCALE, impl="fast")
