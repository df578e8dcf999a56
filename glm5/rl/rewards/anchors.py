"""Answers that people wrote: supervised terms of a step, and members of a group (`[reward.anchors]`).

A row of the file is {"messages": [...]}, as of supervised data; its replies are learnt. Where all messages but the
last are those that a task begins with, the last one is that task's reference answer.

As a member of a group it has no log-probability that it was sampled with. Its ratio is taken as 1, so that its term is
A log pi, and only for A > 0: to push text away that the policy would never say has no bound. LUFFY (arXiv 2504.14945)
weighs such members by pi / (pi + 0.1), which learns nothing from tokens that the policy finds unlikely at first.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from glm5.common.bounded import TABLES, read_bounded_text
from glm5.common.errors import ConfigError, GlmError
from glm5.config.rl import Rollouts
from glm5.config.rl_reward import AnchorsSection
from glm5.rl.environments.protocol import EpisodeFailed, Message, Reply, with_system
from glm5.rl.environments.workers import EnvironmentWorkers
from glm5.rl.rollout import Group, Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.segments import Segment
from glm5.rl.training.sequences import TrainingSequence


class Anchors:
    """The rows of a file, in tokens of the policy. Raises ConfigError naming the line."""

    def __init__(self, cfg: AnchorsSection, chat: TokenChat, rollouts: Rollouts) -> None:
        self.cfg, self._chat = cfg, chat
        self._rows = list[tuple[list[int], list[bool]]]()
        self._replies: dict[str, str] = {}
        for number, line in enumerate(_lines(cfg.file), 1):
            where = f"reward.anchors: {cfg.file}, line {number}"
            messages, tools = _read(line, where)
            try:
                ids, marks = chat.conversation(with_system(rollouts.system, messages), tools)
            except GlmError as error:
                raise ConfigError(f"{where}: {error}") from None
            if len(ids) > (most := rollouts.max_model_len):
                raise ConfigError(f"{where}: {len(ids)} tokens; allowed: up to rollouts.max_model_len {most}")
            self._rows.append((ids, marks))
            self._replies[_key(messages[:-1])] = messages[-1]["content"]

    def of_step(self, step: int) -> list[TrainingSequence]:
        """The conversations of a step's cross-entropy, whose column "ce" has 1 for tokens of replies."""
        if not self.cfg.ce:
            return []
        first, count = step * self.cfg.conversations, min(self.cfg.conversations, len(self._rows))
        return [_supervised(*self._rows[(first + i) % len(self._rows)]) for i in range(count)]

    async def member(self, group: Group, workers: EnvironmentWorkers) -> Rollout | None:
        """The reference answer of a group's task as a rollout, with the environment's reward; None where there is none,
        or the environment does not end with it."""
        task = group.task
        reply = self._replies.get(_key(task.messages)) if self.cfg.members else None
        versions = [v for one in group.rollouts for segment in one.tree.segments for v in segment.versions]
        if reply is None or not versions:
            return None
        try:
            async with await workers.reset(task) as episode:
                turn = await episode.step(Reply(reply))
        except EpisodeFailed:
            return None
        if not turn.is_done:
            return None
        found = Rollout(task, 0, is_anchor=True, num_turns=1)
        like = next(one for one in group.rollouts if one.tree.segments)
        found.temperature, found.messages = like.temperature, [*task.messages, _said(reply)]
        found.rewards, found.metrics = dict(turn.rewards), dict(turn.metrics)
        prompt, ids = like.tree.segments[0], self._chat.said(reply)
        parent = found.tree.add(Segment(list(prompt.token_ids)))
        found.tree.add(
            Segment(ids, parent, is_sampled=True, logprobs=[0.0] * len(ids), versions=[max(versions)] * len(ids))
        )
        return found


def _supervised(ids: Sequence[int], marks: Sequence[bool]) -> TrainingSequence:
    """Tokens that no other stream than the cross-entropy reads."""
    zero_T = np.zeros(len(ids))
    names = ("policy", "entropy", "ref_kl", "advantage", "rollout")
    columns = dict.fromkeys(names, zero_T) | {"temperature": zero_T + 1, "ce": np.array(marks, np.float64)}
    return TrainingSequence(np.array(ids, np.int64), columns)


def _lines(file: str) -> list[str]:
    try:
        lines = read_bounded_text(Path(file), TABLES, ConfigError).removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"reward.anchors: {file}: {error}") from None
    if lines == [""]:
        raise ConfigError(f"reward.anchors: {file} is empty; write a row of {{'messages': [...]}} in each line")
    return lines


def _read(line: str, where: str) -> tuple[list[Message], list[Mapping[str, Any]]]:
    try:
        row = json.loads(line)
        messages, tools = row["messages"], row.get("tools") or []
        well = all(isinstance(one["content"], str) and isinstance(one["role"], str) for one in messages)
        if len(messages) < 2 or not well or messages[-1]["role"] != "assistant":
            raise ValueError("messages need roles and texts, and end with the assistant's")
        if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
            raise ValueError("tools must be a list of objects")
        if not all(one.get("weight", 1) and one.get("loss", True) for one in messages if one["role"] == "assistant"):
            raise ValueError("every reply is learnt: none has weight 0 or loss false")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{where}: no row of {{'messages': [...]}}: {error}") from None
    return messages, tools


def _said(reply: str) -> Message:
    return {"role": "assistant", "content": reply}


def _key(messages: Sequence[Message]) -> str:
    return json.dumps([(one["role"], one.get("content")) for one in messages])
