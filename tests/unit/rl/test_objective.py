"""A reinforcement-learning step on a small model: five streams against their formulas, packing, what stays as it is."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.common.errors import TrainingError
from glm5.config.model import ModelConfig
from glm5.config.step import OptimizerConfig
from glm5.kernels.sampled_logprobs import kept_ids
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.rl.algorithms.ratios import Ratios
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.training.objective import Coefficients, RLObjective, Scored
from glm5.rl.training.packing import batch_of, batches_of, pack
from glm5.rl.training.policy import policy_step, with_logprobs
from glm5.testing.numerics import rel_rms
from glm5.train.batch import Batch
from tests.support.parity import BASE, randomize
from tests.support.rl_batches import sequences
from tests.support.sharded import SMALL

EXACT = 1e-9  # float64, sums in another order: 2e-14 measured
ALL = Coefficients(ref_kl=0.3, entropy=0.2, value=0.7, ce=0.4)
ADAMW = OptimizerConfig(kind="adamw", max_grad_norm=None)


@pytest.fixture(scope="module")
def model() -> Glm5:
    model = Glm5(ModelConfig.from_dict(BASE | SMALL))
    model.add_value_head()
    randomize(model, seed=3)
    return model.double()


def batches(max_tokens: int, preset: str = "grpo", *, ce: bool = True) -> list[Batch]:
    found = sequences(7, 61, PRESETS[preset], kept=True)
    packed = batches_of(found, pack(found, max_tokens), 0)
    # A weight of the cross-entropy that follows from the token, wherever it is packed.
    return [replace(one, weight_T=(one.ids_T % 3 == 1).double() * ce) for one in packed]


def gradients(model: Glm5, given: list[Batch], objective: RLObjective) -> tuple[dict[str, float], dict[str, Tensor]]:
    step = policy_step(copy.deepcopy(model), objective, ADAMW)
    found: dict[str, Tensor] = {}

    def keep() -> dict[str, Tensor]:
        found.update({name: one.grad.clone() for name, one in step.optimizers.named.items() if one.grad is not None})
        return {}

    step.optimizers.clip = keep
    step.optimizers.step = lambda lr: None
    return step.run(given, 0.0), found


def formula(model: Glm5, given: list[Batch], preset: str) -> Tensor:
    """The five means, token by token."""
    sums = {name: torch.zeros((), dtype=torch.float64) for name in ("policy", "ref_kl", "entropy", "value", "ce")}
    weights = dict.fromkeys(sums, 0.0)
    for batch in given:
        hidden = model(batch.ids_T, PackedView(batch.lengths))
        logits, start, kept_at = model.head(hidden), 0, 0
        value = model.value_head(hidden)
        of, counts = batch.columns, batch.kept.count_T.tolist()
        for length in batch.lengths:
            logps, places = [], []
            for t in range(start, start + length):
                mask = batch.kept.words_N[kept_at : kept_at + counts[t]].numpy().tobytes()
                ids = torch.from_numpy(kept_ids(mask).copy()).long() if mask else torch.arange(61)
                kept_at += counts[t]
                if t == start:
                    continue
                plain = logits[t - 1].log_softmax(-1)
                sums["ce"] = sums["ce"] - batch.weight_T[t] * plain[batch.ids_T[t]]
                weights["ce"] += batch.weight_T[t].item()
                sums["value"] = sums["value"] + of["value"][t] * (value[t - 1, 0] - of["return"][t]) ** 2 / 2
                weights["value"] += of["value"][t].item()
                if not of["policy"][t]:
                    continue
                logp = (logits[t - 1, ids] / 0.8).log_softmax(-1)
                logps.append(logp[ids == batch.ids_T[t]][0])
                places.append(t)
                d = of["reference"][t] - logps[-1]
                sums["ref_kl"] = sums["ref_kl"] + of["policy"][t] * (d.exp() - d - 1)
                sums["entropy"] = sums["entropy"] - of["policy"][t] * (logp.exp() * logp).sum()
            if places:
                logp, zero = torch.stack(logps), torch.zeros(len(places), dtype=torch.int64)
                unit = of["policy"][places]
                columns = (of[name][places] for name in ("old", "rollout", "advantage"))
                weight, _ = PRESETS[preset].weigh(Ratios(logp.detach(), *columns, zero, 1))
                sums["policy"] = sums["policy"] - (unit * weight * logp).sum()
                for name in ("policy", "ref_kl", "entropy"):
                    weights[name] += unit.sum().item()
            start += length
    mean = {name: sums[name] / weights[name] for name in sums}
    return mean["policy"] + 0.3 * mean["ref_kl"] - 0.2 * mean["entropy"] + 0.7 * mean["value"] + 0.4 * mean["ce"]


@pytest.mark.parametrize("preset", ["gspo", "dis"])
def test_five_streams_have_the_gradient_of_their_formulas_however_they_are_packed(model, preset):
    textbook = copy.deepcopy(model)
    formula(textbook, batches(10_000, preset), preset).backward()
    want = {name: one.grad for name, one in textbook.named_parameters() if one.grad is not None}
    objective = RLObjective(PRESETS[preset], ALL, chunk=7)
    whole, grads = gradients(model, batches(10_000, preset), objective)
    cut, again = gradients(model, batches(20, preset), objective)
    for name, grad in grads.items():
        assert rel_rms(grad, want[name]) < EXACT, name
        assert rel_rms(again[name], want[name]) < EXACT, name
    assert want.keys() == grads.keys()
    assert "value_head.weight" in grads
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert cut[name] == pytest.approx(value, rel=EXACT, abs=EXACT), name
    control, _ = gradients(model, batches(20, preset)[1:], objective)
    assert abs(control["policy"] - whole["policy"]) > 1e-6


def test_denominators_are_sequences_or_tokens(model):
    """Masked tokens and copies stay in them; a stream without tokens does not stop the others."""
    for preset, want in (("grpo", 8.0), ("dis", 2 * (5 + 7 + 9 + 7.0))):
        objective = RLObjective(PRESETS[preset])
        for max_tokens in (10_000, 20):
            totals = objective.totals(batches(max_tokens, preset, ce=False))
            assert totals["policy"] == totals["entropy"] == pytest.approx(want, rel=EXACT)
            assert (totals["actions"], totals["ce"]) == (56, 0)


def test_masked_tokens_have_exactly_no_gradient(model):
    """Of a batch with some tokens outside the band, the head's input has a gradient at the others only."""
    given = batches(10_000, "dis", ce=False)[0]
    scored: list[Scored] = []
    seen: list[Tensor] = []
    objective = RLObjective(PRESETS["dis"], Coefficients(value=0.0), on_scored=lambda _, one: scored.append(one))
    step = policy_step(copy.deepcopy(model), objective, ADAMW)
    step.model.model.norm.register_forward_hook(lambda _, __, out: (out.retain_grad(), seen.append(out))[0])
    step.optimizers.step = lambda lr: None
    step.run([given], 0.0)
    position = scored[0].index_G - 1
    moved = seen[0].grad[position].abs().amax(dim=1)
    masked, advantage = scored[0].masked_G, given.columns["advantage"][scored[0].index_G]
    assert 0 < masked.sum() < len(masked)
    assert not moved[masked].any()
    assert moved[~masked & (advantage != 0)].min() > 0
    others = torch.ones(len(seen[0]), dtype=torch.bool)
    others[position] = False
    assert not seen[0].grad[others].any()


def test_indexers_mtp_and_router_biases_stay_bit_for_bit(model):
    step = policy_step(copy.deepcopy(model), RLObjective(PRESETS["grpo"]), OptimizerConfig(weight_decay=0.1))
    for number in range(2):
        step.run([batch_of(sequences(number, 61, PRESETS["grpo"]))], 1e-2)
    before, after = model.state_dict(), step.model.state_dict()
    frozen = {n for n in before if ".indexer." in n or ".layers.4." in n or n.endswith("e_score_correction_bias")}
    assert len(frozen) > 20
    for name in before:
        assert torch.equal(before[name], after[name]) == (name in frozen), name
    moving = policy_step(copy.deepcopy(model), RLObjective(PRESETS["grpo"]), ADAMW, balance_step=1e-3)
    moving.run([batch_of(sequences(0, 61, PRESETS["grpo"]))], 0.0)
    assert any(router.e_score_correction_bias.ne(0).any() for router in moving.balance.routers.values())


def test_before_the_first_step_the_old_pass_has_ratio_one(model):
    given = batches(20, ce=False)
    objective = RLObjective(PRESETS["grpo"], on_scored=lambda batch, one: seen.append((batch, one)))
    seen: list[tuple[Batch, Scored]] = []
    step = policy_step(copy.deepcopy(model), objective, ADAMW)
    for batch in [with_logprobs(step, one, "old") for one in given]:
        step.run([batch], 0.0)
        _, scored = seen.pop()
        # A pass without gradients may take other kernels.
        assert rel_rms(batch.columns["old"][scored.index_G], scored.logprob_G) < EXACT
    moved = with_logprobs(step, given[0], "old")
    step.run([given[0]], 1e-2)
    reference = with_logprobs(step, given[0], "reference", model=model)
    assert torch.equal(reference.columns["reference"], moved.columns["old"])
    assert not torch.equal(with_logprobs(step, given[0], "old").columns["old"], moved.columns["old"])


def test_reset_forgets_earlier_steps(model):
    given = batches(10_000)
    step = policy_step(copy.deepcopy(model), RLObjective(PRESETS["grpo"]), OptimizerConfig())
    fresh = {
        name: {key: one.clone() for key, one in state.items()} for name, state in step.optimizers.state_dict().items()
    }
    step.run(given, 1e-3)
    assert any(one.any() for state in step.optimizers.state_dict().values() for one in state.values())
    step.optimizers.reset()
    for name, state in step.optimizers.state_dict().items():
        assert all(torch.equal(one, fresh[name][key]) for key, one in state.items()), name


def test_what_is_missing_or_not_finite_is_named(model):
    objective = RLObjective(PRESETS["grpo"])
    given = batches(10_000, ce=False)[0]

    def refused(match: str, of: Glm5 = model, **columns: Tensor | None) -> None:
        kept = {name: one for name, one in {**given.columns, **columns}.items() if one is not None}
        with pytest.raises(TrainingError, match=match):
            policy_step(copy.deepcopy(of), objective, ADAMW).run([replace(given, columns=kept)], 0.1)

    zero = torch.zeros_like(given.columns["policy"])
    refused("has the column policy and lacks advantage", advantage=None)
    refused("policy is nan.*nothing was updated", advantage=given.columns["advantage"] * math.nan)
    refused(
        "nothing to learn from in 1 batches: no token has a weight in any of policy, value, ce",
        policy=zero,
        ref_kl=zero,
        entropy=zero,
        value=zero,
    )
    plain = copy.deepcopy(model)
    plain.value_head = None
    refused("the model has no value head", plain)
    with pytest.raises(ValueError, match=r"columns of other lengths: \{'old': 3\}"):
        replace(given, columns={"old": torch.zeros(3)})


def test_a_value_head_is_saved_and_loaded(model, tmp_path):
    plain = Glm5(ModelConfig.from_dict(BASE | SMALL))
    assert plain.value_head is None
    assert "value_head" not in plain.cfg.to_dict()
    save(copy.deepcopy(model).float(), tmp_path / "with")
    got = load(tmp_path / "with", dtype=torch.float32)
    assert got.cfg.value_head
    assert torch.equal(got.value_head.weight, model.value_head.weight.float())
