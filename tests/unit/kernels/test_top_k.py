"""top_k against sorting in Python, mostly on ties."""

import math

import pytest
import torch

from glm5.kernels.top_k import top_k

INF = math.inf
IMPLS = ["reference", "partition"]


def oracle(score: torch.Tensor, k: int) -> torch.Tensor:
    rows = []
    for row in score.tolist():
        finite = [s for s in range(len(row)) if row[s] != -INF]
        best = sorted(sorted(finite, key=lambda s: (-row[s], s))[:k])
        rows.append(best + [-1] * (k - len(best)))
    return torch.tensor(rows, dtype=torch.int32).view(len(rows), k)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("T", "S", "k"), [(1, 1, 1), (1, 1, 4), (5, 7, 3), (6, 8, 8), (4, 8, 20), (33, 130, 32), (0, 9, 4)]
)
@pytest.mark.parametrize("levels", [2, 5, 10**6])
def test_equals_sorting(T, S, k, levels, dtype, impl, gen):
    score = (torch.randint(levels, (T, S), generator=gen) - levels // 2).to(dtype)
    score[torch.rand(T, S, generator=gen) < 0.2] = -INF
    got = top_k(score, k, impl=impl)
    assert got.dtype == torch.int32
    assert torch.equal(got, oracle(score, k))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("row", "k", "want"),
    [
        ([1.0, 1.0, 1.0, 1.0], 2, [0, 1]),
        ([0.0, 3.0, 1.0, 1.0, 1.0], 2, [1, 2]),
        ([-0.0, 0.0, -0.0], 1, [0]),  # zeros of both signs are one score
        ([-INF, -INF, -INF], 2, [-1, -1]),
        ([-INF, 2.0, -INF], 2, [1, -1]),
        ([5.0, -INF, -INF, 5.0], 3, [0, 3, -1]),
        ([INF, 0.0, INF], 2, [0, 2]),
        ([1.0, 2.0], 4, [0, 1, -1, -1]),
    ],
)
def test_by_hand(row, k, want, impl):
    assert top_k(torch.tensor([row]), k, impl=impl).tolist() == [want]


@pytest.mark.parametrize("impl", IMPLS)
def test_row_length_does_not_matter(impl, gen):
    """Prefill and decode see the same scores in rows of other lengths; torch.topk alone would pick other keys."""
    score = torch.randint(3, (40, 60), generator=gen).float()
    longer = torch.nn.functional.pad(score, (0, 500), value=-INF)
    assert torch.equal(top_k(score, 16, impl=impl), top_k(longer, 16, impl=impl))
    assert not torch.equal(
        score.topk(16).indices.sort().values, longer.topk(16).indices.sort().values
    )  # the control: these ties do trip torch.topk


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("k", "want"), [(1, [1]), (2, [1, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, -1])])
def test_a_nan_is_chosen_and_never_an_index_error(k, want, impl):
    assert top_k(torch.tensor([[1.0, float("nan"), 2.0]]), k, impl=impl).tolist() == [want]


@pytest.mark.parametrize("impl", IMPLS)
def test_input_is_left_alone_and_no_gradient_passes(impl, gen):
    score = torch.randint(3, (4, 9), generator=gen).float().requires_grad_()
    before = score.detach().clone()
    assert not top_k(score, 3, impl=impl).requires_grad
    assert torch.equal(score, before)


def test_errors():
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        top_k(torch.zeros(1, 2), 0)
    with pytest.raises(ValueError, match="unknown impl 'fast'"):
        top_k(torch.zeros(1, 2), 1, impl="fast")


@pytest.mark.parametrize(
    ("num_keys", "k", "want"), [(575, 8, "partition"), (576, 8, "reference"), (4096, 2048, "partition")]
)
def test_auto_takes_the_cheaper(num_keys, k, want, monkeypatch):
    taken = []
    for name in ("partition", "reference"):
        monkeypatch.setattr(f"glm5.kernels.top_k.{name}.top_k", lambda *_args, name=name: taken.append(name))
    top_k(torch.zeros(1, num_keys), k)
    assert taken == [want]
