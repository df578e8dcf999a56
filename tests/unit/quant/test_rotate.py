"""Folding and rotating change every number and nothing that the model says: in float64, MTP and indexer included."""

import pytest
import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.config.presets import preset
from glm5.model.glm5 import Glm5
from glm5.quant import chunks
from glm5.quant.graph import ROTATIONS
from glm5.quant.hadamard import random_hadamard, shifted_blocks
from glm5.quant.rotate import fold, mtp_corrections, rotate, rotations
from glm5.testing.numerics import rel_rms
from tests.support.models import random_model
from tests.support.saying import said, worst
from tests.support.stacks import stacked_by_name, with_tensors

# The bar of "unchanged" in float64; measured 2.7e-15. A router or an indexer left unturned gives 0.8.
UNCHANGED = 1e-9
ALL = tuple(ROTATIONS)


def rotated(model: Glm5, names, *, upstream=False, leave_out: str = "") -> tuple[Glm5, object]:
    tensors = stacked_by_name(model)
    by = rotations(model.cfg, names, upstream=upstream)
    changed, steps = fold(tensors, names)
    folded = {**tensors, **changed}
    turned, more = rotate(folded, model.cfg, by)
    if leave_out:
        turned[leave_out] = folded[leave_out]
    assert set(steps) <= set(changed)
    assert set(more) == set(turned) | ({leave_out} if leave_out else set())
    corrections = None
    if "residual" in names:
        mtp_norm = tensors[f"model.layers.{model.cfg.num_hidden_layers}.shared_head.norm.weight"]
        corrections = mtp_corrections(by["residual"], tensors["model.norm.weight"], mtp_norm, tensors["lm_head.weight"])
    return with_tensors(model, {**folded, **turned}), corrections


@pytest.fixture(scope="module")
def model() -> Glm5:
    return random_model(3, dtype=torch.float64)


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(320, (40,), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("names", [*((name,) for name in ALL), ALL], ids=str)
def test_nothing_that_the_model_says_changes(names, model, ids):
    turned, corrections = rotated(model, names)
    assert worst(said(turned, ids, corrections), said(model, ids)) < UNCHANGED
    if corrections is not None:
        assert worst(said(turned, ids, corrections, head_by_matrix=True), said(model, ids)) < UNCHANGED


def test_with_upstreams_rotation_of_the_q_latent(model, ids):
    turned, corrections = rotated(model, ALL, upstream=True)
    assert worst(said(turned, ids, corrections), said(model, ids)) < UNCHANGED


@pytest.mark.parametrize("preset_name", ["nano"])
def test_with_other_widths(preset_name):
    model = random_model(4, preset(preset_name), dtype=torch.float64)
    ids = torch.randint(768, (50,), generator=torch.Generator().manual_seed(6))
    turned, corrections = rotated(model, ALL)
    assert worst(said(turned, ids, corrections), said(model, ids)) < UNCHANGED


@pytest.mark.parametrize(
    "left_out",
    ["model.layers.1.mlp.gate.weight", "model.layers.0.self_attn.indexer.wk.weight", "model.layers.4.eh_proj.weight"],
)
def test_a_matrix_left_out_is_noticed(left_out, model, ids):
    turned, corrections = rotated(model, ALL, leave_out=left_out)
    with pytest.raises(AssertionError):
        assert worst(said(turned, ids, corrections), said(model, ids)) < 1e6 * UNCHANGED


def test_without_corrections_drafts_are_others_and_the_model_is_not(model, ids):
    turned, corrections = rotated(model, ALL)
    want = said(model, ids)
    corrections = type(corrections)(torch.eye(64).double(), torch.eye(64).double(), turned.lm_head.weight, None)
    got = said(turned, ids, corrections)
    assert rel_rms(got.logits, want.logits) < UNCHANGED
    assert rel_rms(got.drafts[0], want.drafts[0]) > 0.05


def test_every_matrix_is_turned_by_what_it_reads_and_writes(model):
    """Every 2-D weight but the indexer's own, which keeps its basis because of its rotary part."""
    turned, _ = rotated(model, ALL)
    before, after = stacked_by_name(model), stacked_by_name(turned)
    same = {
        name.split(".", 3)[-1] for name in before if before[name].dim() > 1 and torch.equal(before[name], after[name])
    }
    assert same == set()
    norms = {name for name in after if name.endswith("norm.weight") and not bool((after[name] == 1).all())}
    assert {name.split(".", 3)[-1] for name in norms} == {"self_attn.indexer.k_norm.weight"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_batch_of_experts_is_a_loop_bit_for_bit(dtype, model, monkeypatch):
    cfg, by = model.cfg, rotations(model.cfg, ALL)
    prefix = "model.layers.2."
    tensors = {n: t.to(dtype) for n, t in stacked_by_name(model).items() if n.startswith(prefix)}
    alone = {n: t for n, t in tensors.items() if "*" not in n}
    for name in tensors.keys() - alone.keys():
        alone |= {name.replace("*", str(e)): t for e, t in enumerate(tensors[name])}
    results = []
    for some in (tensors, alone):
        folded = {**some, **fold(some, ALL)[0]}
        results.append({**folded, **rotate(folded, cfg, by)[0]})
        monkeypatch.setitem(chunks._MAX_ELEMENTS, "cpu", 1 << 9)
    for name, got in results[1].items():
        stack = (
            name.replace("experts." + name.split("experts.")[-1].split(".")[0], "experts.*")
            if ".experts." in name
            else name
        )
        want = results[0][stack]
        assert torch.equal(got, want[int(name.split(".experts.")[1].split(".")[0])] if stack != name else want), name


def test_norms_have_to_be_folded_first(model):
    with pytest.raises(ConfigError, match="fold norms"):
        rotate(stacked_by_name(model), model.cfg, rotations(model.cfg, ALL))


@pytest.mark.parametrize("size", [1, 2, 12, 20, 24, 32, 96, 128, 768, 320, 36])
def test_rotations_are_orthogonal_and_spread(size):
    rotation = random_hadamard(size, 7)
    matrix = rotation.matrix()
    assert (matrix @ matrix.T - torch.eye(size)).abs().max() < 1e-12
    blocks = size // rotation.block
    assert blocks == (9 if size == 36 else 1)  # 35 is no prime: nine blocks of 4
    assert torch.allclose(matrix[matrix != 0].abs(), torch.tensor(rotation.block**-0.5).double())
    x = torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    assert torch.allclose(rotation.apply(x), x @ matrix, atol=1e-12)


def test_upstreams_blocks():
    """B P B with B = blockdiag(H_32) and P a cyclic shift by 16, from the matrices themselves."""
    had = torch.ones(1, 1, dtype=torch.float64)
    while len(had) < 32:
        had = torch.cat([torch.cat([had, had], 1), torch.cat([had, -had], 1)])
    blocks = torch.block_diag(*[had / 32**0.5] * 4)
    shift = torch.eye(128, dtype=torch.float64).roll(16, 1)
    assert torch.allclose(shifted_blocks(128).matrix(), blocks @ shift @ blocks, atol=1e-12)


def test_the_width_of_glm5_is_one_block_of_twelve_times_512():
    rotation = random_hadamard(6144, 1)
    assert (rotation.block, rotation.paley) == (6144, 12)
    x = torch.randn(2, 6144, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    assert torch.allclose(rotation.apply(x) @ rotation.apply(x).T, x @ x.T, atol=1e-9)
