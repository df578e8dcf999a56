"""SAO's critic: GAE over sampled tokens, the factor across segments, what learns, and how a run goes on."""

import copy
import signal

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.rl.algorithms.gae import adaptive_lambda, cross_segment_factors, skip_observation_gae
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.loop import run
from glm5.rl.records.digest import digests
from glm5.rl.records.store import Records
from glm5.rl.replay import replay
from glm5.rl.rollout import Rollout
from glm5.rl.segments import Segment
from glm5.rl.training.critic import Critic, judge
from glm5.rl.training.objective import RLObjective
from glm5.rl.training.packing import batches_of, pack
from glm5.rl.training.repair import repair
from glm5.rl.training.sequences import TrainingSequence, sequences_of, sequences_of_step
from glm5.testing.numerics import rel_rms
from tests.support.parity import BASE, randomize
from tests.support.rl_batches import TASK, groups
from tests.support.rl_recipe import small_recipe
from tests.support.sharded import SMALL
from tests.support.whole_runs import finish, run_until
from tests.unit.rl.test_objective import gradients

EXACT = 1e-12
ROUNDED = 1e-9  # float64, sums in another order
SAO = ("algorithm.name=sao", "algorithm.entropy=0", "algorithm.critic.warmup_steps=1", "rollouts.group_size=1")
RUN = (*SAO, "rollouts.groups=64", "warm_start.steps=30", "records.state_every=1")
"""With some rewards in every step."""


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_gae_by_hand():
    """Two actions of two tokens and one, an observation of two tokens between them, whose values must not matter."""
    sampled = torch.tensor([False, True, True, False, False, True])
    reward, value = doubles(0, 0, 0.25, 0, 0, 1), doubles(9, 0.5, 0.4, -7, 8, 0.6)
    # delta: 0.4 - 0.5, 0.25 + 0.6 - 0.4, 1 - 0.6; lambda 1/2
    want = [0, -0.1 + 0.5 * (0.45 + 0.5 * 0.4), 0.45 + 0.5 * 0.4, 0, 0, 0.4]
    assert skip_observation_gae(reward, value, sampled, 0.0, 0.5).tolist() == pytest.approx(want, abs=EXACT)
    cut = skip_observation_gae(reward, value, sampled, 0.3, 0.5)
    assert cut[5].item() == pytest.approx(0.7)
    control = skip_observation_gae(reward, value, torch.ones(6, dtype=torch.bool), 0.0, 0.5)
    assert abs(control[2].item() - want[2]) > 1
    assert adaptive_lambda(1) == pytest.approx(1 / 3)
    assert adaptive_lambda(100) == pytest.approx(1 - 1 / 150)


@pytest.mark.parametrize(("lam", "gamma"), [(0.9, 1.0), (1.0, 1.0), (0.7, 0.8), (0.0, 1.0)])
def test_gae_is_the_sum_of_its_definition(lam, gamma):
    """A_t = sum_k (gamma lambda)^k delta_(t + k), term by term, also for a single token."""
    seed = 5
    print(f"{seed=}")
    gen = torch.Generator().manual_seed(seed)
    for count in (1, 2, 17):
        total = 3 * count
        sampled = torch.zeros(total, dtype=torch.bool)
        sampled[torch.randperm(total, generator=gen)[:count]] = True
        reward, value = (torch.randn(total, generator=gen, dtype=torch.float64) for _ in "ab")
        last, places = 0.37, sampled.nonzero()[:, 0].tolist()
        after = [value[place].item() for place in places[1:]] + [last]
        delta = [reward[p].item() + gamma * v - value[p].item() for p, v in zip(places, after, strict=True)]
        want = torch.zeros(total, dtype=torch.float64)
        for i, place in enumerate(places):
            want[place] = sum((gamma * lam) ** k * one for k, one in enumerate(delta[i:]))
        got = skip_observation_gae(reward, value, sampled, last, lam, gamma)
        assert (got - want).abs().max() < EXACT
        assert not got[~sampled].any()
        assert (skip_observation_gae(reward, value, sampled, last + 0.1, lam, gamma) - want).abs().max() > 1e-3


def test_cross_segment_factors_by_hand():
    """Segments of 4, 2 and 6 tokens: lambda 5/6, 2/3 and 8/9, with 8, 6 and 0 tokens after them."""
    assert cross_segment_factors([4, 2, 6]).tolist() == pytest.approx([(5 / 6) ** 8, (2 / 3) ** 6, 1.0], rel=EXACT)
    assert cross_segment_factors([4, 2], gamma=0.5).tolist() == pytest.approx([(5 / 12) ** 2, 1.0], rel=EXACT)
    assert cross_segment_factors([2, 4]).tolist() != pytest.approx([(5 / 6) ** 2, 1.0])  # the order matters


def compacted(*, truncated: bool = False, reward: float = 1.0) -> list[TrainingSequence]:
    """A rollout of two contexts: two sampled tokens and one, then after a copied summary two more."""
    made = Rollout(TASK, 0, rewards={"all": reward}, is_truncated=truncated)
    parent = made.tree.add(Segment([5, 6]))
    parent = made.tree.add(Segment([7, 8], parent, True, [-0.1, -0.2], [0, 0]))
    parent = made.tree.add(Segment([4], parent))
    made.tree.add(Segment([9], parent, True, [-0.3], [0]))
    parent = made.tree.add(Segment([5, 3, 9]))
    made.tree.add(Segment([10, 11], parent, True, [-0.4, -0.5], [0, 0]))
    return sequences_of(made, 0.0, 1, "token-mean")


def test_segments_of_a_rollout_share_its_end():
    first, second = compacted()
    values = [doubles(0, 0.1, 0.2, 0.9, 0.3, 5), doubles(0, 0, 0.4, 0.5, 0.6)]
    learnt = judge([first, second], values)
    lam, factor = 1 - 1 / 4.5, (1 - 1 / 4.5) ** 2
    # The values before the tokens are 0.1, 0.2, 0.3 (after the observation), and 0.4, 0.5.
    third = 1 - 0.3
    second_token = 0.3 - 0.2 + lam * third
    local = [0, 0, 0.2 - 0.1 + lam * second_token, second_token, 0, third]
    assert first.columns["advantage"].tolist() == pytest.approx([factor * one for one in local], abs=EXACT)
    own = 1 - 1 / 3
    assert second.columns["advantage"].tolist() == pytest.approx([0, 0, 0, 0.1 + own * 0.5, 0.5], abs=EXACT)
    assert [set(one.columns["return"]) for one in learnt] == [{1.0}, {1.0}]
    cut = compacted(truncated=True, reward=0.5)
    learnt = judge(cut, values)
    assert [set(one.columns["return"]) for one in learnt] == [{1.1}, {1.1}]  # 0.6 is expected behind the last token
    assert cut[1].columns["advantage"][-1] == pytest.approx(0.5 + 0.6 - 0.5)
    assert cut[1].columns["advantage"][-1] != pytest.approx(0.0)


@pytest.fixture(scope="module")
def model() -> Glm5:
    model = Glm5(ModelConfig.from_dict(BASE | SMALL))
    randomize(model, seed=3)
    return model.double()


def critic_of(model: Glm5, tmp_path, *settings: str) -> Critic:
    """A critic that begins as `model`, with a head that is not zero."""
    recipe = small_recipe(tmp_path, *SAO, *settings)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": "float64"})})
    made = Critic(recipe, copy.deepcopy(model), model.state_dict())
    with torch.no_grad():
        made.model.value_head.weight.copy_(torch.linspace(-0.5, 0.5, made.model.cfg.hidden_size))
    return made


def test_the_whole_loss_has_the_gradient_of_its_formula(model, tmp_path):
    """- mean of sg(s) A log pi within the bounds, with A by values token by token, and the critic's (V - R)^2 / 2."""
    sequences, gen = sequences_of_step(repair(groups(7, 61))[0], PRESETS["sao"]), torch.Generator().manual_seed(1)
    for one in sequences:  # most ratios are within the bounds, and some are not
        logp = (model.head(model(torch.from_numpy(one.ids), PackedView([len(one)]))) / 0.8).log_softmax(-1).detach()
        own = torch.cat([doubles(0), logp[:-1].gather(1, torch.from_numpy(one.ids)[1:, None])[:, 0]])
        one.columns["rollout"] = (own + 0.4 * torch.randn(len(one), generator=gen)).numpy()
    critic = critic_of(model, tmp_path)
    step = critic.step
    seen: dict[str, Tensor] = {}

    def keep(named) -> dict[str, Tensor]:
        seen.update({name: one.grad.clone() for name, one in named.items() if one.grad is not None})
        return {"trunk": torch.zeros(())}

    step.optimizers.clip = lambda: keep(step.optimizers.named)
    step.optimizers.step = lambda lr: None
    told = critic.learn(sequences, 0.0)
    policy, textbook, number = copy.deepcopy(model), copy.deepcopy(critic.model), 0
    for one in (*policy.parameters(), *textbook.parameters()):
        one.requires_grad_()
    loss, of_critic, kept = 0.0, 0.0, list[bool]()
    for one in sequences:
        ids, reward = torch.from_numpy(one.ids), one.rollout.reward
        value = textbook.value_head(textbook(ids, PackedView([len(ids)])))[:, 0]
        logp = (policy.head(policy(ids, PackedView([len(ids)]))) / 0.8).log_softmax(-1)
        places = np.flatnonzero(one.columns["policy"]).tolist()
        lam, after, v_next, advantages = 1 - 1 / (1.5 * len(places)), 0.0, None, {}
        for t in reversed(places):
            v = value[t - 1].item()
            after = (reward if v_next is None else v_next) - v + lam * after
            advantages[t], v_next = after, v
        for t in places:
            of = logp[t - 1, ids[t]]
            s = (of.detach() - one.columns["rollout"][t]).exp().item()
            kept.append(0.7 < s < 6.0)
            loss = loss - (s if 0.7 < s < 6.0 else 0.0) * advantages[t] * of
            of_critic = of_critic + (value[t - 1] - reward) ** 2 / 2
        number += len(places)
    assert 0 < sum(kept) < len(kept)
    (loss / number).backward()
    (of_critic / number).backward()
    packed = batches_of(sequences, pack(sequences, 20), 0)
    _, grads = gradients(policy, packed, RLObjective(PRESETS["sao"], chunk=7))
    for name, grad in grads.items():
        assert rel_rms(grad, dict(policy.named_parameters())[name].grad) < ROUNDED, name
    assert told["critic/loss"] == pytest.approx(of_critic.item() / number, rel=ROUNDED)
    assert "value_head.weight" in seen
    for name, grad in seen.items():
        assert rel_rms(grad, dict(textbook.named_parameters())[name].grad) < ROUNDED, name
    for one in sequences:  # the control: the reward alone
        one.columns["advantage"] = np.full(len(one), one.rollout.reward)
    _, control = gradients(policy, batches_of(sequences, pack(sequences, 20), 0), RLObjective(PRESETS["sao"]))
    assert rel_rms(control["lm_head.weight"], policy.lm_head.weight.grad) > 0.01


def test_observations_and_masked_tokens_have_exactly_no_gradient(model, tmp_path):
    """Neither in the policy nor in the critic: the head's input moves at states before sampled tokens alone."""
    sequences = sequences_of_step(repair(groups(7, 61))[0], PRESETS["sao"])
    critic, seen = critic_of(model, tmp_path), list[Tensor]()
    critic.step.optimizers.step = lambda lr: None

    def keep(_module, _given, out: Tensor) -> None:
        if out.requires_grad:
            out.retain_grad()
            seen.append(out)

    critic.model.model.norm.register_forward_hook(keep)
    critic.learn(sequences, 0.0)
    weight = torch.cat([one.columns["policy"] for one in batches_of(sequences, pack(sequences, 10_000), 0)])
    wanted = weight.roll(-1) != 0
    moved = seen[0].grad.abs().amax(dim=1) != 0
    assert 0 < wanted.sum() < len(wanted)
    assert moved.tolist() == wanted.tolist()
    one = sequences[0]
    assert not one.columns["advantage"][one.columns["policy"] == 0].any()


def test_attention_stays_as_it_is_and_values_are_learnt(model, tmp_path):
    critic = critic_of(model, tmp_path, "algorithm.critic.updates=3", "algorithm.critic.lr=1.0")
    sequences = sequences_of_step(repair(groups(7, 61))[0], PRESETS["sao"])
    before = {name: one.clone() for name, one in critic.model.state_dict().items()}
    told = [critic.learn(sequences, 1e-2) for _ in range(4)]
    changed = {name for name, one in critic.model.state_dict().items() if not torch.equal(one, before[name])}
    learning = {name for name, one in critic.model.named_parameters() if one.requires_grad}
    assert changed == learning
    assert "value_head.weight" in changed
    assert not [name for name in changed if any(part in name for part in ("self_attn", "norm", "embed", "mlp.gate."))]
    assert any("experts" in name for name in changed)
    assert any("mlp" in name and "experts" not in name for name in changed)
    assert told[-1]["critic/loss"] < 0.5 * told[0]["critic/loss"]
    assert told[0]["critic/explained_variance"] < told[-1]["critic/explained_variance"] <= 1


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("done")
    run(small_recipe(folder, *RUN))
    return folder


def state_of(folder) -> dict:
    return torch.load(folder / "run/state.pt", weights_only=True)["trainer"]


def weights_of(folder) -> dict[str, str]:
    state = state_of(folder)
    of_critic = digests(state["critic"]["model"])
    return dict(digests(state["model"])) | {f"critic {name}": one for name, one in of_critic.items()}


@pytest.mark.slow
def test_the_policy_is_frozen_while_values_warm_up(done):
    states = {
        step: torch.load(path, weights_only=True)["trainer"] for step, path in Records(done / "run").states().items()
    }
    assert digests(states[0]["model"]) == digests(states[1]["model"])
    assert digests(states[1]["model"]) != digests(states[2]["model"])
    assert digests(states[0]["critic"]["model"]) != digests(states[1]["critic"]["model"])
    moments = [one for state in states[1]["optimizer"].values() for one in state.values()]
    assert not any(one.any() for one in moments)


@pytest.mark.long
def test_a_killed_run_goes_on_to_the_same_bits(done, tmp_path):
    code, _ = run_until(tmp_path, "small 2/3", signal.SIGKILL, *RUN)
    assert code == -signal.SIGKILL
    assert finish(tmp_path, *RUN).returncode == 0
    assert weights_of(tmp_path) == weights_of(done)


@pytest.mark.slow
def test_a_step_is_replayed_to_the_bit(done):
    assert all(not one.tensors for one in replay(done / "run", 3))
