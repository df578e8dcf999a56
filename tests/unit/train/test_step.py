"""A step's losses and gradients against the formulas in float64; cut into batches it is the same step."""

import copy

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.common.errors import TrainingError
from glm5.config.model import ModelConfig
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.model import Glm5
from glm5.model.packed import PackedView
from glm5.testing.numerics import rel_rms
from glm5.train.batch import Batch
from glm5.train.evaluate import held_out
from glm5.train.optim.build import Optimizers
from glm5.train.step import Phase, Step
from tests.support.parity import BASE, randomize
from tests.support.peak import peak_bytes
from tests.support.textbook import Textbook

EXACT = 1e-9  # float64, sums in another order: 3e-15 measured between batches
LENGTHS = [19, 1, 26]
SPARSE = Phase("sparse", learn_index=True)


class Kept(Optimizers):
    """Keeps the gradients of a step, as they were before clipping, and updates nothing."""

    def clip(self) -> dict[str, Tensor]:
        self.grads = {name: one.grad.clone() for name, one in self.named.items() if one.grad is not None}
        return super().clip()

    def step(self, lr: float) -> None:
        pass


class Drafting(Textbook):
    """Where the config says so, later applications of the MTP layer read what the first one selected."""

    selected: Tensor | None = None

    def layer(self, i: int, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        out, used = super().layer(i, x, self.selected)
        self.selected = used if self.cfg.index_share_for_mtp_iteration else None
        return out, used


@pytest.fixture(scope="module", params=[False, True], ids=["own selections", "shared selections"])
def model(request) -> Glm5:
    changes = {"num_nextn_predict_layers": 1, "index_topk_pattern": "FSFF", "index_topk": 8}
    model = Glm5(ModelConfig.from_dict(BASE | changes | {"index_share_for_mtp_iteration": request.param})).double()
    randomize(model, seed=3)
    return model


@pytest.fixture(scope="module")
def batch() -> Batch:
    gen = torch.Generator().manual_seed(5)
    num = sum(LENGTHS)
    ids = torch.randint(2, BASE["vocab_size"], (num,), generator=gen)
    return Batch(ids, torch.randint(0, 3, (num,), generator=gen).double() / 2, LENGTHS)


def parts(batch: Batch) -> list[Batch]:
    ids, weights = batch.ids_T.split(batch.lengths), batch.weight_T.split(batch.lengths)
    return [Batch(i, w, [len(i)]) for i, w in zip(ids, weights, strict=True)]


def ran(
    model: Glm5, batches: list[Batch], phase: Phase = SPARSE, **losses
) -> tuple[dict[str, float], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    kept = Kept(dict(model.named_parameters()), model.cfg, OptimizerConfig())
    return Step(model, kept, LossConfig(**losses), phase).run(batches, 0.0), kept.grads


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(rel_rms(got[name], want[name]) for name in want)


def test_batches_sum_to_the_step(model, batch):
    """Cross-entropy, three MTP depths, KL of all indexers, auxiliary loss: packed equals one by one."""
    metrics, grads = ran(model, [batch], balance_weight=0.1)
    one_by_one, want = ran(model, parts(batch), balance_weight=0.1)
    assert worst(grads, want) < EXACT
    assert metrics.keys() == one_by_one.keys() >= {"loss", "mtp 3", "index", "mtp index", "balance", "mtp balance"}
    assert all(one_by_one[name] == pytest.approx(value, rel=EXACT) for name, value in metrics.items())
    _, control = ran(model, parts(batch)[:1] + parts(batch)[2:], balance_weight=0.1)
    assert worst(control, want) > 1e-3


def test_losses_and_gradients_are_those_of_the_formulas(model, batch):
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for name in dict(model.named_parameters()):
        weights[name].requires_grad_()
    totals = [sum(part.weight_T[k:].sum() for part in parts(batch)) for k in range(5)]
    wanted = dict.fromkeys(["loss", "mtp 1", "mtp 2", "mtp 3", "index", "mtp index"], torch.zeros(()).double())
    for part in parts(batch):
        share, num = len(part.ids_T) / len(batch.ids_T), len(part.ids_T)
        main, mtp = Textbook(model.cfg, weights), Drafting(model.cfg, weights)
        hidden = main.hidden(part.ids_T)
        for k in range(4):
            if k:
                hidden = mtp.draft(part.ids_T[(torch.arange(num) + k).clamp(max=num - 1)], hidden)
            if num > k + 1:
                each = F.cross_entropy(main.head(hidden)[: -(k + 1)], part.ids_T[k + 1 :], reduction="none")
                name = f"mtp {k}" if k else "loss"
                wanted[name] = wanted[name] + (each * part.weight_T[k + 1 :]).sum() / totals[k + 1]
        wanted["index"] = wanted["index"] + main.index_loss() * share
        wanted["mtp index"] = wanted["mtp index"] + mtp.index_loss() * share
    mtp = (wanted["mtp 1"] + wanted["mtp 2"] + wanted["mtp 3"]) / 3
    (wanted["loss"] + 0.25 * mtp + wanted["index"] + wanted["mtp index"]).backward()

    metrics, grads = ran(model, [batch], mtp_weight=0.25, balance_weight=0.0)
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value.item(), rel=EXACT), name
    assert worst(grads, {name: weights[name].grad for name in grads}) < EXACT
    _, shallow = ran(model, [batch], mtp_weight=0.25, balance_weight=0.0, mtp_depth=2)
    assert worst(shallow, grads) > 1e-3


def test_warm_up_trains_indexers_alone(model, batch):
    frozen = copy.deepcopy(model)
    for name, weight in frozen.named_parameters():
        weight.requires_grad_(".indexer." in name)
    metrics, grads = ran(frozen, [batch], Phase("warmup", learn_index=True))
    assert grads.keys() == {name for name, _ in model.named_parameters() if ".indexer." in name}
    assert {"loss", "index", "mtp index", "indexer norm"} <= metrics.keys()
    assert "trunk norm" not in metrics


def test_what_is_not_a_number_updates_nothing(model, batch):
    broken = copy.deepcopy(model).float()
    with torch.no_grad():
        broken.lm_head.weight[3, 3] = float("nan")
    before = copy.deepcopy(broken.state_dict())
    optimizers = Optimizers(dict(broken.named_parameters()), broken.cfg, OptimizerConfig())
    with pytest.raises(TrainingError, match=r"loss is nan, .*nothing was updated.*; lm_head\.weight holds NaN"):
        Step(broken, optimizers, LossConfig(), Phase()).run([batch], 0.1)
    assert all(torch.equal(one.nan_to_num(), before[name].nan_to_num()) for name, one in broken.state_dict().items())
    assert all(weight.grad is None for weight in broken.parameters())


def test_nothing_to_learn_from_is_said(model, batch):
    step = Step(model, Optimizers({}, model.cfg, OptimizerConfig()), LossConfig(), Phase())
    with pytest.raises(TrainingError, match="nothing to learn from in 1 batches"):
        step.run([Batch(batch.ids_T, torch.zeros(len(batch.ids_T)), batch.lengths)], 0.1)


def test_a_step_learns_and_evaluation_sees_it(model, batch):
    learner = copy.deepcopy(model).float()
    optimizers = Optimizers(dict(learner.named_parameters()), learner.cfg, OptimizerConfig())
    step = Step(learner, optimizers, LossConfig(), SPARSE)
    before = held_out(learner, [batch], SPARSE)["held-out loss"]
    metrics = [step.run([batch], 0.02) for _ in range(4)]
    assert metrics[0]["loss"] == pytest.approx(before, rel=1e-4)
    assert held_out(learner, [batch], SPARSE)["held-out loss"] < 0.8 * before
    assert metrics[-1]["excess load"] >= 0
    assert any(router.e_score_correction_bias.any() for router in step.balance.routers.values())


def test_batches_must_add_up():
    with pytest.raises(ValueError, match="a batch of 3 ids"):
        Batch(torch.zeros(3), torch.zeros(3), [2])


@pytest.mark.parametrize("keys", ["warmup", "sparse"])
def test_memory_of_learning_to_index_grows_with_the_context_not_its_square(keys):
    """A pass over one sequence, forward and backward: twice the tokens take about twice the memory."""
    small = {"num_nextn_predict_layers": 0, "num_hidden_layers": 2, "index_topk": 8, "index_topk_pattern": None}
    model = Glm5(ModelConfig.from_dict(BASE | small))
    randomize(model, seed=3)

    def peak(num: int) -> int:
        view = PackedView([num], stage=keys, learn_index=True)
        with peak_bytes() as peak:
            hidden = model(torch.arange(num) % BASE["vocab_size"], view)
            (hidden.square().mean() + view.index_loss()).backward()
        model.zero_grad()
        return peak.at_most

    short, long = peak(512), peak(1024)
    print(f"{keys}: {short / 2**20:.1f} MiB for 512 tokens, {long / 2**20:.1f} for 1024")
    assert long < 2.2 * short
