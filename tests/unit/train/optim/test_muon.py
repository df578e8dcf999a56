"""Muon Split: each update's shape and size, its invariances, and torch's own Muon as the witness for one matrix."""

import pytest
import torch
from torch import Tensor, nn

from glm5.testing.numerics import rel_rms
from glm5.train.optim.muon import Muon
from glm5.train.optim.newton_schulz import COEFFICIENTS, flops, orthogonalize
from glm5.train.optim.table import join_matrices, split_matrices

# Measured on 150 random matrices: 0.68..1.13, 0.978..1.032, 0.86..1.14, 0.9995..1.001.
SINGULAR = {"quintic": (0.6, 1.3), "quintic-5": (0.9, 1.1), "polar-express": (0.8, 1.2), "two-phase": (0.98, 1.02)}
EXACT = 1e-12  # float64, batched against one by one; 2e-15 measured
BF16 = 5 * 2**-8  # both sides in bfloat16: each of five polynomials rounds its result
HEADS, ROWS, COLS = 8, 32, 64


@pytest.fixture
def gen(seed) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def update(grad: Tensor, rows: tuple[int, ...] = (), **options) -> Tensor:
    """What one step at learning rate 1 takes off a weight."""
    weight = nn.Parameter(torch.zeros_like(grad))
    weight.grad = grad.clone()
    Muon([weight], {weight: rows}, **{"lr": 1.0, "weight_decay": 0.0, **options}).step()
    return -weight.detach()


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (3, 6, 20)], ids=str)
def test_singular_values_are_near_one(name, shape, gen):
    lowest, highest = SINGULAR[name]
    # Rectangular: of square random matrices the smallest singular value is too small for five steps of any set.
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=gen), COEFFICIENTS[name]))
    assert values.min() > lowest
    assert values.max() < highest
    raw = torch.linalg.svdvals(torch.randn(shape, generator=gen))
    assert raw.max() > highest


def test_zero_stays_zero():
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((HEADS * ROWS, COLS), (ROWS,)), ((HEADS * 40, COLS), (16, 24)), ((4, 2 * ROWS, COLS), (ROWS, ROWS))],
    ids=str,
)
def test_every_matrix_moves_by_the_same_rms(shape, rows, gen):
    """0.2 times the root mean square singular value, which five steps leave at 0.85 to 0.97."""
    for part in split_matrices(update(torch.randn(shape, generator=gen), rows), rows):
        rms = part.square().mean(dim=(1, 2)).sqrt()
        assert rms.min() > 0.2 * 0.8
        assert rms.max() < 0.2 * 1.1


def test_one_head_equals_the_whole(gen):
    grad = torch.randn(ROWS, COLS, generator=gen)
    assert torch.equal(update(grad, (ROWS,)), update(grad))


def test_heads_may_be_reordered(gen):
    grad = torch.randn(HEADS, ROWS, COLS, generator=gen, dtype=torch.float64)
    order = torch.randperm(HEADS, generator=gen)
    got = update(grad[order].flatten(0, 1), (ROWS,))
    want = update(grad.flatten(0, 1), (ROWS,)).view(HEADS, ROWS, COLS)[order].flatten(0, 1)
    assert rel_rms(got, want) < EXACT
    assert rel_rms(update(grad[order].flatten(0, 1)), update(grad.flatten(0, 1))) > 0.1  # the order did change


def test_a_stack_equals_a_loop(gen):
    grad = torch.randn(5, 12, 20, generator=gen, dtype=torch.float64)
    assert rel_rms(update(grad), torch.stack([update(one) for one in grad])) < EXACT
    fused = update(grad, (4, 8))
    loop = torch.stack([torch.cat([update(one[:4]), update(one[4:])]) for one in grad])
    assert rel_rms(fused, loop) < EXACT


def test_pieces_of_a_stack_are_the_same(gen, monkeypatch):
    grad = torch.randn(7, 4, 6, generator=gen, dtype=torch.float64)
    whole = orthogonalize(grad)
    monkeypatch.setattr("glm5.train.optim.newton_schulz._PIECE", {"cpu": 50})
    assert rel_rms(orthogonalize(grad), whole) < EXACT


def test_the_size_of_gradients_does_not_count(gen):
    grad = torch.randn(HEADS * ROWS, COLS, generator=gen, dtype=torch.float64)
    assert rel_rms(update(1000 * grad, (ROWS,)), update(grad, (ROWS,))) < EXACT


def test_cut_and_join(gen):
    tensor = torch.randn(3, 10, 4, generator=gen)
    assert torch.equal(join_matrices(split_matrices(tensor, (2, 3)), tensor.shape), tensor)
    with pytest.raises(ValueError, match="whole groups of"):
        split_matrices(tensor, (4,))


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="updates matrices"):
        Muon([nn.Parameter(torch.zeros(3))], {})


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)], ids=str)
def test_several_steps_equal_torch_muon(shape, gen):
    """Momentum, Nesterov, decay and factor, against torch.optim.Muon (bfloat16 products) over five steps."""
    start = torch.randn(shape, generator=gen)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    options = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9}
    own = Muon([ours], {}, compute_dtype=torch.bfloat16, **options)
    witness = torch.optim.Muon([theirs], adjust_lr_fn="match_rms_adamw", **options)
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=gen)
        theirs.grad = ours.grad.clone()
        own.step()
        witness.step()
    assert rel_rms(ours - start, theirs - start) < BF16
    control = nn.Parameter(start.clone())
    wrong = Muon([control], {}, compute_dtype=torch.bfloat16, **(options | {"momentum": 0.8}))
    control.grad = ours.grad.clone()
    wrong.step()
    assert rel_rms(control - start, theirs - start) > 10 * BF16


def test_starved_heads_move_as_far_as_the_others(gen):
    """Half of the heads with gradients 100 times smaller: whole, they starve by about that; apart, they do not."""
    grad = torch.randn(HEADS, ROWS, COLS, generator=gen)
    grad[HEADS // 2 :] /= 100

    def rms(rows: tuple[int, ...]) -> tuple[float, float]:
        heads = update(grad.flatten(0, 1), rows).view(HEADS, -1).square().mean(dim=1).sqrt()
        return heads[: HEADS // 2].mean().item(), heads[HEADS // 2 :].mean().item()

    large, small = rms((ROWS,))
    assert small == pytest.approx(large, rel=0.03)
    large, small = rms(())
    print(f"whole: {large:.4f} and {small:.4f}")
    assert 40 < large / small < 130


def test_operations_of_the_published_shapes():
    """Training notes, 2.3: 1460 GFLOP for q_b whole, 182.5 split."""
    whole, split = flops(16384, 2048), 64 * flops(256, 2048)
    assert round(whole / 1e9) == 1460
    assert round(split / 1e8) == 1825
    assert whole / split == pytest.approx(8.0, rel=1e-3)
