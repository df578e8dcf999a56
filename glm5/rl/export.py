"""`glm5 rl export`: from the records of a run back to supervised fine-tuning.

    rollouts of a task, over all steps -> reward at least X -> distinct answers -> the best k -> rows

A row has the conversation's messages. Failed turns stay as context with "weight": 0 (GLM-5 report, section 3.1: what
went wrong stays in the trajectory, masked). A turn failed where a tool or the environment answered it with an error,
where a program that it ran was ended from outside, where the guard blocked its call, or where it was cut off.

Of a rollout whose history was edited or compacted no list of messages says what each reply saw. Its rows are the token
ids of the paths through its tree; each reply is learnt in one of them.
"""

import json
import re
from collections.abc import Iterator, Sequence
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from glm5.common.atomic import atomic_write
from glm5.common.errors import DataError
from glm5.common.progress import Progress
from glm5.config.rl_records import RLExportConfig
from glm5.rl.environments.protocol import Message
from glm5.rl.records.store import Records, read_groups
from glm5.rl.rollout import Rollout
from glm5.rl.rollouts.guard import DUMMY

_ERROR = re.compile(r"error(:|$)|(.*\n)?ended by: [^\n]*$", re.DOTALL)
"""What environments answer to calls that failed."""


class Kept(NamedTuple):
    """Rows of a rollout, how many turns they hold and how many of these failed; `said`: all its replies."""

    reward: float
    num_tokens: int
    said: str
    rows: list[dict[str, Any]]
    num_turns: int
    num_failed: int


def export(cfg: RLExportConfig) -> str:
    """Write the rows; returns what was kept and left out. Raises DataError where there is nothing to export."""
    records, num_rollouts = Records(Path(cfg.folder)), 0
    steps = records.steps()[-(cfg.last_steps or 0) :]
    if not steps:
        raise DataError(f"{records.folder}: there are no records; the recipe's records.every says what is kept")
    best: dict[str, list[Kept]] = {}
    with Progress(len(steps), "step", "reading records") as progress:
        for step in steps:
            for group in read_groups(records, step):
                num_rollouts += len(group.rollouts)
                good = (one for one in group.rollouts if one.is_valid and not one.is_withheld and isfinite(one.reward))
                found = [kept_of(one, cfg.keep_thinking) for one in good if one.reward >= cfg.min_reward]
                key = group.task.key
                best[key] = _best([*best.get(key, []), *(one for one in found if one.rows)], cfg.best)
            progress.update(1)
    kept = [one for of_task in best.values() for one in of_task]
    if not kept:
        raise DataError(
            f"none of {num_rollouts} rollouts has a reward of {cfg.min_reward:g} or more and a turn to learn from (one "
            "that is whole and did not fail); --min-reward takes another reward"
        )
    rows = [row for one in kept for row in one.rows]
    done = "replaced" if Path(cfg.out).exists() else "wrote"
    with atomic_write(cfg.out) as handle:
        handle.writelines(json.dumps(row) + "\n" for row in rows)
    num_turns, num_failed = (sum(getattr(one, name) for one in kept) for name in ("num_turns", "num_failed"))
    return (
        f"{done} {cfg.out}: {len(rows)} rows of {len(kept)} rollouts, the best of {num_rollouts} in {len(steps)} "
        f"steps; {num_turns} turns, {num_failed} of them failed and masked"
    )


def kept_of(rollout: Rollout, keep_thinking: float) -> Kept:
    """The rows of a rollout: none where no turn is to be learnt, or where replies and tokens do not fit each other."""
    replies = [number for number, one in enumerate(rollout.messages) if one["role"] == "assistant"]
    failed, segments = set(failed_replies(rollout)), rollout.tree.segments
    sampled = [index for index, one in enumerate(segments) if one.is_sampled]
    rows: list[dict[str, Any]] = []
    if len(rollout.tree.leaves()) == 1 and len(failed) < len(replies):
        messages = _thought(rollout, keep_thinking)
        for number in failed:
            messages[number]["weight"] = 0
        tools = {"tools": [dict(one) for one in rollout.task.tools]} if rollout.task.tools else {}
        rows.append({"messages": messages, **tools, "thinking": "preserved"})
    elif len(sampled) == len(replies):
        learnt = {index for index, reply in zip(sampled, replies, strict=True) if reply not in failed}
        for leaf in rollout.tree.leaves():
            path = rollout.tree.path(leaf)
            if own := learnt.intersection(path):
                marks = [int(index in own) for index in path for _ in segments[index].token_ids]
                rows.append({"token_ids": rollout.tree.token_ids(leaf), "loss_mask": marks})
                learnt -= own
    said = json.dumps([rollout.messages[number] for number in replies])
    return Kept(rollout.reward, rollout.tree.num_sampled, said, rows, len(replies), len(failed))


def failed_replies(rollout: Rollout) -> Iterator[int]:
    """Places in the messages of replies that are not to be learnt."""
    messages, is_guarded = rollout.messages, rollout.metrics.get("hack_blocked", 0) > 0
    answered = False
    for number in reversed(range(len(messages))):
        one = messages[number]
        if one["role"] != "assistant":
            answered |= _is_error(one, is_guarded=is_guarded)
            continue
        is_last = all(other["role"] != "assistant" for other in messages[number + 1 :])
        if answered or (is_last and (rollout.is_truncated or rollout.failure is not None)):
            yield number
        answered = False


def _is_error(message: Message, *, is_guarded: bool) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(_ERROR.match(content) or (is_guarded and content == DUMMY))


def _thought(rollout: Rollout, keep_thinking: float) -> list[dict[str, Any]]:
    """The messages, without the thinking of turns that are not drawn. A turn is all behind a message of the user."""
    random, keeps, found = Random(f"thinking {rollout.seed}"), True, list[dict[str, Any]]()
    for message in rollout.messages:
        if message["role"] == "user":
            keeps = random.random() < keep_thinking
        found.append({key: value for key, value in message.items() if keeps or key != "reasoning_content"})
    return found


def _best(kept: Sequence[Kept], most: int | None) -> list[Kept]:
    """The best of a task, distinct in what they say, at most `most`."""
    distinct = {one.said: one for one in kept}
    return sorted(distinct.values(), key=lambda one: (-one.reward, one.num_tokens))[:most]
