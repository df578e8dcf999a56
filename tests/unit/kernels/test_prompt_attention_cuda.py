"""prompt_attention in CUDA C++: attend.cu on a CPU, a program or two at a time. tests/gpu has it on a GPU."""

import pytest
import torch

from glm5.kernels.act_quant import act_quant
from glm5.kernels.prompt_attention import cuda, prompt_attention
from glm5.testing.numerics import rel_rms
from tests.support.cuda_on_cpu import HeadsMatrix, build

BUDGET = 6e-3  # of p's and the result's rounding: measured 2.6e-3
SCALE = 0.0625


def make_case(lengths: list[int], padding: int, num_heads: int, gen: torch.Generator):
    """Keys lie side by side with others, values head by head, as the engine's products write them."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    first = [start for start, length in zip(starts, lengths, strict=True) for _ in range(length)]
    T = len(first) + padding
    q, kv, rope = (torch.randn(T, *s, generator=gen).bfloat16() for s in [(num_heads, 256), (num_heads, 200), (72,)])
    v = torch.randn(num_heads, T, 256, generator=gen).bfloat16().transpose(0, 1)
    return q, kv[..., :192], rope[:, :64], v, torch.tensor(first + [T + 9] * padding, dtype=torch.int32)


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("lengths", "padding", "shares"),
    [
        ([1], 0, 1),
        ([100, 3, 130], 20, 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [([270], 0, 1), ([1], 0, 2), ([270], 0, 2)]),
        pytest.param([100, 3, 130], 20, 2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_agrees_with_the_reference(monkeypatch, gen, tmp_path, lengths, padding, shares):
    """Rings that are used again, requests that begin inside a tile, padding rows, a last tile of few rows."""
    given = {"SHARES": shares, "SHARED_STORAGE": cuda._SHARED_STORAGE}
    kernels = {
        quantize: build(cuda.SOURCE, tmp_path, "attend_prompt", given | {"QUANTIZE": int(quantize)}, "prompt_on_cpu.h")
        for quantize in (False, True)
    }
    monkeypatch.setattr(cuda, "refusal", lambda *given: "")
    monkeypatch.setattr(cuda, "num_shares", lambda *given: shares)
    monkeypatch.setattr(cuda.triton_support, "multiprocessors", lambda _device: 1)
    monkeypatch.setattr(cuda, "_kernel", lambda _shares, quantize, _device: kernels[quantize])
    monkeypatch.setattr(cuda.cuda_code, "heads_map", HeadsMatrix)
    case = make_case(lengths, padding, 2, gen)
    want, want_lse = prompt_attention(*(x.double() for x in case[:4]), case[4], scale=SCALE, impl="reference")
    got, got_lse = prompt_attention(*case, scale=SCALE, impl="cuda")
    real = sum(lengths)
    assert rel_rms(got[:real], want[:real]) < BUDGET
    assert (got_lse[:real] - want_lse[:real]).abs().max() < 1e-4
    assert not got[real:].any()
    assert (got_lse[real:] == float("-inf")).all()
    codes, scales = cuda.prompt_attention_quantized(*case, scale=SCALE)
    want_codes, want_scales = act_quant(got.flatten(1))
    assert torch.equal(codes.view(torch.uint8), want_codes.view(torch.uint8))
    assert torch.equal(scales, want_scales)
    wrong, _ = prompt_attention(*case, scale=1.2 * SCALE, impl="cuda")  # the control
    assert real == 1 or rel_rms(wrong[:real], want[:real]) > BUDGET


def test_two_programs_share_keys_where_it_was_faster():
    """On an H200 (docs/performance-kernels.md): (heads, tokens) and programs a tile."""
    halved = [(8, 512), (8, 1024), (8, 2048), (16, 512)]
    whole = [(8, 8192), (16, 256), (16, 1024), (16, 2048), (64, 2048)]
    assert {cuda.num_shares(heads, tokens // 128, 132) for heads, tokens in halved} == {2}
    assert {cuda.num_shares(heads, tokens // 128, 132) for heads, tokens in whole} == {1}


def test_what_is_refused(gen):
    case = make_case([5], 0, 2, gen)
    with pytest.raises(ValueError, match=r"prompt_attention\[cuda\] needs bfloat16 .* got torch.float32 and"):
        prompt_attention(*(x.float() for x in case[:4]), case[4], scale=SCALE, impl="cuda")
    with pytest.raises(ValueError, match=r"widths of .* got torch.bfloat16 and \[128, 64, 256\]; use impl='triton'"):
        prompt_attention(case[0], case[1][..., :128], case[2], case[3], case[4], scale=SCALE, impl="cuda")
    turned = case[3].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="needs v_THV with rows at multiples of 16 bytes, got strides"):
        prompt_attention(case[0], case[1], case[2], turned, case[4], scale=SCALE, impl="cuda")
    with pytest.raises(ValueError, match="needs Hopper, got cpu"):
        prompt_attention(*case, scale=SCALE, impl="cuda")


def test_no_tokens_and_a_scale_that_is_none(monkeypatch, gen):
    monkeypatch.setattr(cuda, "refusal", lambda *given: "")
    case = make_case([], 0, 2, gen)
    out, lse = prompt_attention(*case, scale=SCALE, impl="cuda")
    assert (out.shape, lse.shape) == ((0, 2, 256), (0, 2))
    with pytest.raises(ValueError, match=r"needs a scale above zero, got -1\.0"):
        prompt_attention(*case, scale=-1.0, impl="cuda")
