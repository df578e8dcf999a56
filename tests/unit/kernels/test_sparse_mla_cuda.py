"""sparse_mla in CUDA C++: attend.cu on a CPU, a program at a time, and what it is for. tests/gpu has it on a GPU."""

from importlib import import_module

import pytest
import torch

from glm5.kernels.fp8_pool import Fp8Latents, LatentFormat, quantize_latents
from glm5.kernels.sparse_mla import cuda, sparse_mla
from glm5.kernels.sparse_mla.cuda import num_shares
from glm5.testing.numerics import rel_rms
from tests.support.cuda_on_cpu import build
from tests.support.dispatch import as_on, chosen_by

BUDGET = 6e-3  # of p's and the result's rounding: measured 2.4e-3 in bfloat16, 1.8e-3 in FP8


def test_shares_fill_the_gpu_and_no_second_turn_is_short():
    def shares_of(count, num_keys):
        return num_shares(count, num_keys, lambda shares: 132 // shares, 132)

    assert [shares_of(count, 2048) for count in (1, 8, 32, 64, 128, 132)] == [32, 16, 4, 2, 1, 1]
    for count in range(1, 512):
        shares = shares_of(count, 2048)
        turns = -(-count // (132 // shares))
        assert turns * (-(-32 // shares) + 1.5) <= -(-count // 132) * 33.5, f"{count=}"
    assert shares_of(1, 1) == shares_of(3, 64) == 1


def test_clusters_that_do_not_fit_are_not_taken():
    at_once = [132, 66, 40, 32, 24, 20, 16, 16, 8, 8, 8, 8, 8, 0, 0, 0]
    assert num_shares(1, 2048, lambda shares: at_once[shares - 1], 16) == 11
    assert num_shares(8, 2048, lambda shares: at_once[shares - 1], 16) == 11
    assert num_shares(16, 2048, lambda shares: at_once[shares - 1], 16) == 8


@pytest.mark.compiler
@pytest.mark.parametrize(("is_fp8", "H", "shares"), [(False, 8, 1), (True, 8, 1), (True, 8, 3), (True, 16, 2)])
def test_agrees_with_the_reference(monkeypatch, gen, tmp_path, is_fp8, H, shares):
    """A step's queries, keys that are none among those selected; a query that sees nothing."""
    T, C, R, Z, P = 3, 512 if is_fp8 else 128, 64, 16, 40
    monkeypatch.setattr(cuda, "refusal", lambda *given: "")
    monkeypatch.setattr(cuda, "num_shares", lambda *given: shares)
    monkeypatch.setattr(cuda.triton_support, "multiprocessors", lambda _device: 1)
    if is_fp8:
        constants = {"H": H, "Z": Z, "STAGES": 2, "SHARED_STORAGE": cuda._storage_bytes(H, 2)}
        kernel = build(cuda.FP8_SOURCE, tmp_path, "attend_fp8", constants, "attend_on_cpu.h")
        monkeypatch.setattr(cuda, "_fp8_kernel", lambda *given: (kernel, []))
    else:
        constants = {"H": H, "C": C, "R": R, "Z": Z, "STAGES": 2}
        kernel = build(cuda.SOURCE, tmp_path, "attend", constants, "attend_on_cpu.h")
        monkeypatch.setattr(cuda, "_kernel", lambda *given: kernel)
    row_PZL = torch.randn(P, Z, C + R, generator=gen).bfloat16()
    pool, latent_PZL = row_PZL, row_PZL
    if is_fp8:
        row_PZL *= torch.rand(P, Z, 1, generator=gen) + 0.2  # so that scales differ
        form = LatentFormat(C, R)
        pool = Fp8Latents(quantize_latents(row_PZL.flatten(0, 1), form).unflatten(0, (P, Z)), form)
    q_THL = torch.randn(T, H, C + R, generator=gen).bfloat16()
    keys_TK = torch.stack([torch.randperm(P * Z, generator=gen)[:500] for _ in range(T)]).int()
    keys_TK[0, 40:70] = -1
    where = torch.randperm(P, generator=gen).view(1, P).int(), torch.zeros(T).int(), torch.tensor([600, 640, 0]).int()
    opts = {"scale": 0.1, "value_dim": C}
    got, got_lse = sparse_mla(q_THL, pool, keys_TK, *where, **opts, impl="cuda")
    exact = pool if is_fp8 else latent_PZL.double()
    want, want_lse = sparse_mla(q_THL.double(), exact, keys_TK, *where, **opts, impl="gather")
    assert rel_rms(got[:2], want[:2]) < BUDGET
    assert (got_lse[:2] - want_lse[:2]).abs().max() < 0.02
    assert not got[2].any()
    assert (got_lse[2] == float("-inf")).all()
    faint, _ = sparse_mla((q_THL.double() * 1e-37).bfloat16(), pool, keys_TK, *where, **opts, impl="cuda")
    want_faint, _ = sparse_mla(q_THL.double() * 1e-37, exact, keys_TK, *where, **opts, impl="gather")
    assert rel_rms(faint[:2], want_faint[:2]) < BUDGET
    keys_TK[1, ::9] = -1
    want, _ = sparse_mla(q_THL.double(), exact, keys_TK, *where, **opts, impl="gather")
    assert rel_rms(got[:2], want[:2]) > BUDGET


def test_what_is_refused():
    where = torch.zeros(1, 2).int(), torch.zeros(1).int(), torch.ones(1).int()
    q, pool = torch.zeros(1, 8, 576, dtype=torch.bfloat16), torch.zeros(2, 64, 576, dtype=torch.bfloat16)
    opts = {"scale": 1.0, "value_dim": 512, "impl": "cuda"}
    with pytest.raises(
        ValueError,
        match=r"sparse_mla\[cuda\] needs queries in bfloat16, and latents in bfloat16 or FP8; use impl='triton'",
    ):
        sparse_mla(q.float(), pool.float(), None, *where, **opts)
    with pytest.raises(ValueError, match=r"needs 8 or 16 heads, .* got 4, 512, 576"):
        sparse_mla(q[:, :4], pool, None, *where, **opts)
    with pytest.raises(ValueError, match="needs Hopper, got cpu"):
        sparse_mla(q, pool, None, *where, **opts)


def test_auto_takes_it_where_it_is_faster_and_can_be_built(monkeypatch):
    module = import_module("glm5.kernels.sparse_mla")
    as_on(monkeypatch, "gpu", "triton", "hopper")
    monkeypatch.setattr(cuda, "refusal", lambda *given: "")
    pool, form = torch.zeros(2, 64, 576, dtype=torch.bfloat16), LatentFormat(512, 64)
    fp8 = Fp8Latents(quantize_latents(pool.flatten(0, 1), form).unflatten(0, (2, 64)), form)

    def taken(pool, H):
        given = pool, torch.zeros(1, 1).int(), torch.zeros(1, 2).int(), torch.zeros(1).int(), 512
        counts = (3, 4, 23, 24, 512, 513, 8192)
        choices = {T: chosen_by(module.TABLE, torch.zeros(T, H, 576, dtype=torch.bfloat16), *given) for T in counts}
        return [T for T, choice in choices.items() if choice == "cuda"]

    assert taken(fp8, 8) == taken(fp8, 16) == [4, 23, 24, 512, 513, 8192]
    assert taken(pool, 8) == [24, 512, 513, 8192]
    assert taken(pool, 16) == [24, 512]
    monkeypatch.setattr(cuda, "refusal", lambda *given: "needs NVRTC")
    assert taken(fp8, 8) == []
