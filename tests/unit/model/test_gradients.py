"""The model, its MTP layer, its gradients and the indexer's loss against formulas written out in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.config.model import ModelConfig
from glm5.model import Glm5
from glm5.model.packed import PackedView
from tests.support.parity import BASE, randomize
from tests.support.textbook import Textbook

EXACT = 1e-9  # relative; float64 on both sides, sums in another order: 1e-14 measured
FLOAT32 = 5e-5  # relative to the largest gradient of a parameter; 5e-6 measured
LENGTH = 40


@pytest.fixture(scope="module", params=["FSFF", "FFFF"])
def model(request) -> Glm5:
    cfg = ModelConfig.from_dict(BASE | {"num_nextn_predict_layers": 1, "index_topk_pattern": request.param})
    model = Glm5(cfg).double()
    randomize(model, seed=3)
    return model


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(2, BASE["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(5))


def textbook(model: Glm5, dense: bool = False) -> Textbook:
    weights = {name: tensor.detach().clone().double() for name, tensor in model.state_dict().items()}
    for name in dict(model.named_parameters()):
        weights[name].requires_grad_()
    return Textbook(model.cfg, weights, dense)


def losses(model, view: PackedView | None, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the next and the next but one token, and the indexer's loss, of either implementation."""
    if view is None:
        hidden = model.hidden(ids)
        drafted = model.draft(ids.roll(-1), hidden)
    else:
        hidden = model(ids, view)
        drafted, _ = model.draft(ids.roll(-1), hidden, view)
    ce = F.cross_entropy(model.head(hidden)[:-1], ids[1:]) + F.cross_entropy(model.head(drafted)[:-2], ids[2:])
    return ce, (model if view is None else view).index_loss()


def gradients(model: Glm5, stage: str, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    ce, kl = losses(model, PackedView([len(ids)], stage=stage, learn_index=True), ids)
    (ce + kl).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def largest_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    return max(((got[n].double() - want[n]).abs().max() / want[n].abs().max()).item() for n in want)


@torch.no_grad()
def test_forward_and_draft_equal_the_formulas(model, ids):
    book, view = textbook(model), PackedView([LENGTH])
    hidden, want = model(ids, view), book.hidden(ids)
    assert (hidden - want).abs().max() < EXACT
    drafted, _ = model.draft(ids.roll(-1), hidden, view)
    assert (drafted - book.draft(ids.roll(-1), want)).abs().max() < EXACT


@pytest.mark.parametrize("stage", ["sparse", "warmup"])
def test_gradients_equal_autograd_of_the_formulas(model, ids, stage):
    book = textbook(model, dense=stage == "warmup")
    sum(losses(book, None, ids)).backward()
    want = {name: book.weights[name].grad for name in dict(model.named_parameters())}
    assert all(grad is not None and grad.abs().max() > 0 for grad in want.values())
    assert largest_difference(gradients(model, stage, ids), want) < EXACT

    single = Glm5(model.cfg)
    single.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter, source in zip(single.parameters(), model.parameters(), strict=True):
            source.copy_(parameter)  # the float64 side gets the rounded weights, so choices agree
    book = textbook(model, dense=stage == "warmup")
    sum(losses(book, None, ids)).backward()
    want = {name: book.weights[name].grad for name in want}
    assert largest_difference(gradients(single, stage, ids), want) < FLOAT32


def test_budget_notices_a_wrong_scale(model, ids):
    """Control: scores scaled by 1.001 move the indexer's gradients beyond both budgets."""
    want = gradients(model, "sparse", ids)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weights_proj.weight"):
                parameter.mul_(1.001)
    try:
        assert largest_difference(gradients(model, "sparse", ids), want) > FLOAT32
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("weights_proj.weight"):
                    parameter.div_(1.001)


def test_each_loss_reaches_only_its_own_parameters(model, ids):
    for which in (0, 1):
        model.zero_grad()
        losses(model, PackedView([LENGTH], learn_index=True), ids)[which].backward()
        reached = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
        indexer = {name for name, _ in model.named_parameters() if ".indexer." in name}
        assert reached == (indexer if which else {name for name, _ in model.named_parameters()} - indexer)


def test_packed_sequences_are_independent(model, ids):
    """Sum over a packed batch of losses and gradients equals the sequences alone."""
    lengths = [LENGTH - 20, 1, 19]
    parts = ids.split(lengths)
    with torch.no_grad():
        packed = model(ids, PackedView(lengths))
        alone = torch.cat([model(part, PackedView([len(part)])) for part in parts])
    assert (packed - alone).abs().max() < EXACT

    view = PackedView(lengths, learn_index=True)
    model.zero_grad()
    model(ids, view).square().sum().backward()
    view.index_loss().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for part in parts:
        view = PackedView([len(part)], learn_index=True)
        model(part, view).square().sum().backward()
        (view.index_loss() * len(part) / LENGTH).backward()
    want = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert largest_difference(got, want) < EXACT


@torch.no_grad()
def test_chained_drafts_reuse_the_selection(model, ids):
    """A given selection is used as it is and the indexer is not run, as GLM-5.2 drafts."""
    view = PackedView([LENGTH])
    hidden, selection = model.draft(ids.roll(-1), model(ids, view), view)

    class NoSelect(PackedView):
        def select(self, *args, **kwargs):
            raise AssertionError("the indexer ran")

    again, used = model.draft(ids.roll(-2), hidden, NoSelect([LENGTH]), selection)
    assert used is selection
    assert again.isfinite().all()
