"""One reward of all sources: rules, an outcome reward model, a generative judge, and penalties.

    z_s     = (x_s - mean) / max(std, floor_s) over the valid rollouts of a group       x_s as it is with scale = "none"
    reward  = sum_s w_s z_s - sum_g w_g penalty_g

The terms are the rollout's named `rewards`, whose sum it is trained on; `metrics` have each raw x_s (NAME_raw), and

    proxy   = sum_s w_s x_s - sum_g w_g penalty_g       what the sources believe, comparable from step to step
    true    the environment's metric of that name, or a held-out reward model: shown, never rewarded

Scaling each source before the sum: GDPO (arXiv 2601.05242). Where a source says nothing about an answer, as where the
judge is down, the answer gets the mean of its group: that source then neither favours nor punishes it, the others go
on, and no group is lost to an endpoint. It is counted by kind (judge_KIND). An attempt without a reply gets the least
value of its group, so that failing never pays.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, Protocol

from glm5.config.rl import RLRecipe
from glm5.config.rl_reward import SourceSection
from glm5.rl.environments.protocol import Message
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.rewards.anchors import Anchors
from glm5.rl.rewards.guards import penalties
from glm5.rl.rewards.judge import Judge
from glm5.rl.rollout import Group, Rollout


class RewardScorer(Protocol):
    """An outcome reward model: the higher a conversation's score, the better its last reply."""

    def score(self, conversations: Sequence[tuple[Sequence[Message], Sequence[Mapping[str, Any]]]]) -> list[float]:
        """Of conversations, each messages and tools."""
        ...


Values = list[float | None]
"""Of a group's answers; None where a source says nothing."""


class Blend:
    """The rewards of a recipe that has `[reward]`. `load`: the scorer of a reward model's folder."""

    def __init__(self, recipe: RLRecipe, load: Callable[[str], RewardScorer], anchors: Anchors | None = None) -> None:
        assert recipe.reward is not None, "a recipe without [reward] has nothing to blend"
        self.cfg, self._max_tokens = recipe.reward, recipe.rollouts.max_tokens
        weights: dict[str, float] = {name: one.weight for name, one in self.cfg.sources.items()}
        self._weights = {one.name: weights | dict(one.reward) for one in recipe.environment}
        self.judge = None if self.cfg.judge is None else Judge(self.cfg.judge)
        self._anchors = anchors
        self._model = None if self.cfg.model is None else load(self.cfg.model.folder)
        self._held_out = None if self.cfg.held_out is None else load(self.cfg.held_out)
        self._scoring = asyncio.Lock()  # one pass of a model at a time

    async def score(self, group: Group, name: str, workers: EnvironmentWorkers) -> None:
        """Set the rewards of a group's valid rollouts, to which the reference answer of its task may be added. `name`:
        the environment's, in the recipe."""
        if self._anchors is not None and (member := await self._anchors.member(group, workers)) is not None:
            group.rollouts = [*group.rollouts, member]
        rollouts, values, weights = await self._measured(group, name)
        sources: Mapping[str, SourceSection] = {**self.cfg.sources}
        scaled = {source: scale(sources[source], each) for source, each in values.items()}
        for number, rollout in enumerate(rollouts):
            own = {source: weights[source] * each[number] for source, each in scaled.items() if weights[source]}
            rollout.rewards = own | {
                part: -getattr(self.cfg.guards, part) * rollout.metrics[f"penalty_{part}"]
                for part in ("length", "repetition", "phrases")
                if rollout.metrics[f"penalty_{part}"]
            }

    async def measure(self, group: Group, name: str) -> None:
        """Set the metrics alone, as of held-out tasks, whose rewards stay the environment's."""
        await self._measured(group, name)

    async def _measured(self, group: Group, name: str) -> tuple[list[Rollout], dict[str, Values], dict[str, float]]:
        rollouts, weights = [one for one in group.rollouts if one.is_valid], self._weights[name]
        answers = [answer_of(one) for one in rollouts]
        values: dict[str, Values] = {"rules": [one.reward for one in rollouts]}
        if self._model is not None:
            values["model"] = await self._scored(self._model, rollouts)
        if self.judge is not None and weights["judge"]:
            values["judge"] = await self._judged(self.judge, group, rollouts)
        if self._held_out is not None:
            for rollout, value in zip(rollouts, await self._scored(self._held_out, rollouts), strict=True):
                rollout.metrics |= {} if value is None else {"true": value}
        for number, (rollout, answer) in enumerate(zip(rollouts, answers, strict=True)):
            raw = {source: value for source, each in values.items() if (value := each[number]) is not None}
            rollout.metrics |= {f"{source}_raw": value for source, value in raw.items()}
            proxy = sum(weights[source] * value for source, value in raw.items())
            replies = [len(one.token_ids) for one in rollout.tree.segments if one.is_sampled]
            found = penalties(self.cfg.guards, answer or "", replies[-1] if replies else 0, self._max_tokens)
            rollout.metrics |= {f"penalty_{part}": value for part, value in found.items()}
            proxy -= sum(getattr(self.cfg.guards, part) * value for part, value in found.items())
            if len(raw) == len(values):
                rollout.metrics["proxy"] = proxy
        return rollouts, values, weights

    async def _scored(self, model: RewardScorer, rollouts: Sequence[Rollout]) -> Values:
        if not (said := [one for one in rollouts if answer_of(one) is not None]):
            return [None] * len(rollouts)
        async with self._scoring:
            scores = iter(await asyncio.to_thread(model.score, [(one.messages, one.task.tools) for one in said]))
        return _least([None if answer_of(one) is None else next(scores) for one in rollouts], rollouts)

    async def _judged(self, judge: Judge, group: Group, rollouts: Sequence[Rollout]) -> Values:
        if not (said := [one for one in rollouts if answer_of(one) is not None]):
            return [None] * len(rollouts)
        rubric, answers = str(group.task.data.get("rubric", "")), [answer_of(one) or "" for one in said]
        verdicts = await judge.values(list(group.task.messages), answers, rubric)
        shown = {"judge_first": verdicts.first, "judge_agreed": verdicts.agreed}
        shown |= {f"judge_{kind}": count / len(said) for kind, count in verdicts.failures.items()}
        for rollout in said:
            rollout.metrics |= {name: float(value) for name, value in shown.items() if value is not None}
        values = iter(verdicts.values)
        return _least([None if answer_of(one) is None else next(values) for one in rollouts], rollouts)


def scale(cfg: SourceSection, values: Values) -> list[float]:
    """A source's values on its scale; where it says nothing, the mean of the others, 0 where there are none."""
    known = [one for one in values if one is not None]
    mean = fmean(known) if known else 0.0
    filled = [mean if one is None else one for one in values]
    if cfg.scale == "none":
        return filled
    return [(one - mean) / max(pstdev(known), cfg.floor) for one in filled] if known else filled


def answer_of(rollout: Rollout) -> str | None:
    """The text of its last reply; None where it has none, or failed by its own fault."""
    last = rollout.messages[-1] if rollout.messages else {}
    return str(last.get("content") or "") if last.get("role") == "assistant" and rollout.failure is None else None


def _least(values: Values, rollouts: Sequence[Rollout]) -> Values:
    """Where a rollout has no reply, the least of the values."""
    least = min((one for one in values if one is not None), default=None)
    return [least if answer_of(of) is None else one for one, of in zip(values, rollouts, strict=True)]
