"""Human anchors: supervised terms beside the policy's, and members of a group at ratio 1 where they are better."""

import asyncio
import json
import math

import numpy as np
import pytest
import torch

from glm5.chat.template import ChatTemplate
from glm5.common.errors import ConfigError
from glm5.config.rl import Rollouts
from glm5.config.rl_reward import AnchorsSection
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.environments.digits import Digits
from glm5.rl.environments.protocol import Task, Turn
from glm5.rl.environments.single_turn import SingleTurn
from glm5.rl.loop import run
from glm5.rl.records.store import Records, read_groups
from glm5.rl.replay import replay
from glm5.rl.rewards.anchors import Anchors
from glm5.rl.rollout import Group, Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.segments import Segment
from glm5.rl.training.objective import Coefficients, RLObjective
from glm5.rl.training.packing import batch_of
from glm5.rl.training.repair import repair
from glm5.rl.training.sequences import divided, sequences_of_step, with_anchors
from glm5.rl.watch import read_lines
from glm5.train.objective import Pass
from tests.support.long_conversations import LocalEpisode
from tests.support.rl_recipe import small_recipe
from tests.support.tokenizers import tiny_tokenizer

CHAT = TokenChat(ChatTemplate.bundled("glm-5.2", tiny_tokenizer()))
TASK = Task("say", 0, 0, ({"role": "user", "content": "Say yes."},), {})
REPLY = "yes, of course"


def row(*said: str) -> str:
    roles = ("user", "assistant")
    return json.dumps({"messages": [{"role": roles[i % 2], "content": one} for i, one in enumerate(said)]})


def anchors(tmp_path, *rows: str, **settings) -> Anchors:
    file = tmp_path / "anchors.jsonl"
    file.write_text("\n".join(rows))
    section = AnchorsSection.model_validate({"file": str(file), **settings})
    return Anchors(section, CHAT, Rollouts(max_model_len=256, system="Be kind."))


def rollout(reward: float) -> Rollout:
    found = Rollout(TASK, 0, rewards={"right": reward}, messages=[*TASK.messages])
    found.tree.add(Segment(CHAT.prompt(TASK.messages)))
    found.tree.add(Segment([5, 6], 0, is_sampled=True, logprobs=[-1.0, -2.0], versions=[3, 4]))
    return found


class Workers:
    """Rewards a reply by its letters, in an episode that ends with it, or does not."""

    def __init__(self, *, is_done: bool = True) -> None:
        self._is_done = is_done

    async def reset(self, task: Task) -> "Workers":
        self.episode = LocalEpisode(
            SingleTurn(task, lambda reply: Turn(is_done=self._is_done, rewards={"letters": len(reply.content) / 10}))
        )
        return self

    async def __aenter__(self) -> LocalEpisode:
        return self.episode

    async def __aexit__(self, *_) -> None:
        await self.episode.close()


def member_of(of: Anchors, *rewards: float, task: Task = TASK, is_done: bool = True) -> tuple[Group, Rollout | None]:
    group = Group(0, task, [rollout(one) for one in rewards])
    return group, asyncio.run(of.member(group, Workers(is_done=is_done)))  # pyright: ignore[reportArgumentType]


def test_supervised_terms_come_in_turn_with_the_system_message(tmp_path):
    of = anchors(tmp_path, row("a", "b"), row("c", "d"), row("e", "f", "g", "h"), conversations=2)
    texts = [[CHAT.tokenizer.decode(one.ids.tolist()) for one in of.of_step(step)] for step in (0, 1)]
    assert ["Be kind." in text for text in texts[0]] == [True, True]
    assert "<|user|>e<|assistant|>" in texts[1][0]
    assert "<|user|>a<|assistant|>" in texts[1][1]
    assert anchors(tmp_path, row("a", "b"), ce=0).of_step(0) == []
    two = of.of_step(1)[0]
    learnt = two.ids[two.columns["ce"] > 0].tolist()
    assert learnt == [*CHAT.said("f"), *CHAT.said("h")]
    assert not any(two.columns[name].any() for name in ("policy", "entropy", "ref_kl", "advantage", "rollout"))


def test_a_reference_answer_is_a_member_with_the_environments_reward(tmp_path):
    of = anchors(tmp_path, row("Say yes.", REPLY), members=True)
    group, member = member_of(of, 0.0, 1.0)
    assert member is not None
    assert (member.rewards, member.is_anchor, member.is_valid) == ({"letters": len(REPLY) / 10}, True, True)
    segments = member.tree.segments
    assert segments[0].token_ids == group.rollouts[0].tree.segments[0].token_ids
    assert (segments[1].token_ids, set(segments[1].versions)) == (CHAT.said(REPLY), {4})
    other = Task("say", 0, 0, ({"role": "user", "content": "Say no."},), {})
    assert member_of(of, 0.0, task=other)[1] is None
    assert member_of(of, 0.0, is_done=False)[1] is None
    assert member_of(anchors(tmp_path, row("Say yes.", REPLY)), 0.0)[1] is None


def trained(tmp_path, *rewards: float):
    group, member = member_of(anchors(tmp_path, row("Say yes.", REPLY), members=True), *rewards)
    assert member is not None
    group.rollouts = [*group.rollouts, member]
    return sequences_of_step(repair([group])[0], PRESETS["dis"])


def test_an_anchor_is_learnt_from_where_it_is_better_and_counts_in_the_mean(tmp_path):
    better = trained(tmp_path, 0.0, 0.4)  # the anchor's reward is 1.4
    assert [one.columns["advantage"].sum() / (one.columns["policy"] > 0).sum() for one in better] == pytest.approx(
        [-0.6, -0.2, 0.8]
    )
    assert np.isnan(better[2].columns["rollout"]).sum() == len(CHAT.said(REPLY))
    worse = trained(tmp_path, 3.0, 2.0)
    assert worse[2].columns["advantage"].max() == 0.0  # not pushed away
    assert worse[0].columns["advantage"].max() == pytest.approx(3.0 - 6.4 / 3)


class Scripted:
    """A model of which only the head is asked for, and a scorer that says these log-probabilities."""

    def __init__(self, logprob_G: torch.Tensor) -> None:
        self.logprob_G = logprob_G
        self.lm_head = self
        self.weight = torch.zeros(1)

    def __call__(self, *_args, **_kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        return self.logprob_G, torch.zeros_like(self.logprob_G)


def test_the_ratio_of_an_anchor_is_one(tmp_path):
    """- sum A log pi over its tokens, whatever they are worth to the policy: 1 - eps < s < 1 + eps always holds."""
    (*_, anchor) = trained(tmp_path, 0.0, 0.4)
    batch = batch_of([anchor])
    count = len(CHAT.said(REPLY))
    logprob_G = torch.linspace(-30, -1, count, dtype=torch.float64, requires_grad=True)
    model = Scripted(logprob_G)
    objective = RLObjective(PRESETS["dis"], Coefficients(), scorer=model)
    totals = objective.totals([batch])
    hidden_TD = torch.zeros(len(batch.ids_T), 1)
    given = Pass(model, batch, hidden_TD, totals, lambda *_: None, {})  # pyright: ignore[reportArgumentType]
    losses = dict(objective.losses(given))
    losses["policy"].backward()
    assert logprob_G.grad is not None
    assert logprob_G.grad.tolist() == pytest.approx([-0.8 / count] * count, abs=1e-12)
    assert losses["masked"] == losses["mismatch_kl"] == 0.0


def test_supervised_terms_join_the_parts_of_a_step(tmp_path):
    kept, _ = repair([Group(0, TASK, [rollout(1.0), rollout(0.0)])])
    sequences = sequences_of_step(kept, PRESETS["grpo"])
    parts = divided(kept, sequences, 1)
    given = anchors(tmp_path, row("a", "b"), row("c", "d")).of_step(0)
    with_anchors(sequences, parts, given)
    assert len(parts[0]) == len(sequences) == 4
    batch = batch_of(sequences)
    assert batch.weight_T.sum() == sum(one.columns["ce"].sum() for one in given)
    assert "ce" not in batch.columns
    assert not math.isnan(batch.columns["policy"].sum().item())


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        (row("a"), "end with the assistant's"),
        (row("a", "b", "c"), "end with the assistant's"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": null}]}', "roles and texts"),
        (row("a", "b " * 300), "max_model_len 256"),
        (row("a", "b")[:-1] + ', "tools": [1]}', "tools must be a list of objects"),
        (row("a", "b").replace('"content": "b"', '"content": "b", "weight": 0'), "none has weight 0"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path, line, told):
    with pytest.raises(ConfigError, match=told):
        anchors(tmp_path, row("a", "b"), line)


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(ConfigError, match="is empty"):
        anchors(tmp_path)
    assert len(anchors(tmp_path, json.dumps(json.loads(row("a", "b\u2028c")), ensure_ascii=False), "").of_step(0)) == 1
    with pytest.raises(ConfigError, match="No such file"):
        Anchors(AnchorsSection(file=str(tmp_path / "none")), CHAT, Rollouts())


@pytest.mark.slow
def test_a_whole_run(tmp_path):
    """Anchors are trained in the engine's arithmetic beside rollouts, and a judge that is gone ends nothing."""
    environment = Digits("sort")
    tasks = [environment.task(seed, 0) for seed in range(4)]
    texts = [(one.messages[0]["content"], one.data["wanted"]) for one in tasks]
    (tmp_path / "anchors.jsonl").write_text("\n".join(row(*one) for one in texts))
    section = f"anchors={{file='{tmp_path}/anchors.jsonl',members=true,ce=0.5}}"
    section += ",judge={url='http://127.0.0.1:9',retries=0},guards={length_from=0.1}"
    sort = "environment=[{name='sort',tasks=4}]"
    run(small_recipe(tmp_path, sort, f"reward={{{section}}}", "steps=2", "evaluation.tasks=1"))
    lines = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if "reward/mean" in line]
    assert all(line["train/ce"] > 0 and line["logp/abs_diff_max"] == 0 and line["kl/mismatch"] == 0 for line in lines)
    # The first evaluation has noticed that nobody answers, so that it is not asked for a minute.
    assert all(line.get("metric/judge_down", 0) + line.get("metric/judge_paused", 0) > 0 for line in lines)
    assert all("metric/proxy" not in line for line in lines)  # a part of it is not known
    groups = read_groups(Records(tmp_path / "run"), 2)
    assert [[one.is_anchor for one in group.rollouts] for group in groups] == [[False] * 4 + [True]] * 4
    for group in groups:
        values = {"rules": 0.0, "judge": 0.0, "length": 0.0}
        for one in group.rollouts:
            assert one.metrics["rules_raw"] == 1.0 or not one.is_anchor
            values = {name: values[name] + one.rewards.get(name, 0.0) for name in values}
        assert (values["judge"], values["rules"], values["length"] < 0) == (0.0, pytest.approx(0.0), True)
    assert [one.tensors for one in replay(tmp_path / "run", 2)] == [[], []]  # to the bit, from the beginning on
