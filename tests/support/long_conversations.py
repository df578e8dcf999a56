"""Long conversations with tools, shortened in every way: by scripted replies, without a model.

`python -m tests.support.long_conversations` prints the table of docs/rl-search.md.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import train_bpe
from glm5.config.rl import Rollouts
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.environments.protocol import Episode, Message, Reply, Task, Turn
from glm5.rl.environments.table import make
from glm5.rl.rollout import Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.conversation import REQUEST
from glm5.rl.rollouts.engines import Engines
from glm5.rl.rollouts.harness import Harness
from glm5.rl.rollouts.policy import Sampled
from glm5.rl.training.prefixes import Prefixes
from glm5.rl.training.sequences import sequences_of
from tests.unit.rl.boxes import WITHIN

PAGE = 64  # tokens of which an engine finds prefixes again


class LocalEpisode:
    """An episode of this process, as a worker's."""

    def __init__(self, episode: Episode) -> None:
        self._episode, self.messages, self.is_closed = episode, tuple(episode.messages), False

    async def step(self, reply: Reply) -> Turn:
        return self._episode.step(reply)

    async def close(self) -> None:
        self.is_closed = True
        self._episode.close()


@dataclass
class LocalWorkers:
    reset: Callable[[Task], Episode]

    async def reset_all(self, task: Task, count: int) -> list[LocalEpisode]:
        return [LocalEpisode(self.reset(task)) for _ in range(count)]


class Talking:
    """Answers every reply with results, `turns` times, then ends with a reward of 1."""

    def __init__(self, task: Task, turns: int, say: Callable[[int], Sequence[Message]]) -> None:
        self.messages, self._turns, self._say, self._number = task.messages, turns, say, 0

    def step(self, reply: Reply) -> Turn:
        self._number += 1
        if self._number > self._turns:
            return Turn(is_done=True, rewards={"all": 1.0})
        return Turn(tuple(self._say(self._number)))

    def close(self) -> None:
        pass


def result(number: int, text: str = "") -> Message:
    return {"role": "tool", "tool_call_id": f"call-{number}", "content": text or f"result {number}"}


class Started:
    """An engine that is never asked."""

    is_ready = True

    def start(self) -> None: ...


@dataclass
class ScriptedPolicy:
    """Says the lines of a script in turn, and `summary` where it is asked for one. `seen`: each prompt and reply."""

    cfg: Rollouts
    chat: TokenChat
    script: Sequence[str]
    summary: str = "I found nothing yet.<|user|>"
    sampling: dict[str, float] = field(default_factory=lambda: {"temperature": 1.0})
    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)
    number: int = 0
    engines: Engines = field(default_factory=lambda: Engines(lambda _: Started(), 1))

    def __post_init__(self) -> None:
        self.engines.start()

    def room(self, num_prompt: int) -> int:
        return min(self.cfg.max_tokens, self.cfg.max_model_len - num_prompt)

    async def reply(self, prompt_ids: Sequence[int], seed: int, key: int) -> Sampled:
        if REQUEST in self.chat.tokenizer.decode(prompt_ids[-400:]):
            said = self.summary
        else:
            said = self.script[self.number]
            self.number += 1
        whole = self.chat.tokenizer.encode(said)
        ids = whole[: self.room(len(prompt_ids))]
        self.seen.append((list(prompt_ids), ids))
        return Sampled(ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), is_truncated=len(ids) < len(whole))


def said(reply: Reply) -> str:
    """A scripted reply as a policy would say it."""
    calls = [one["function"] for one in reply.tool_calls]
    pairs = ["".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in one["arguments"].items())
             for one in calls]  # fmt: skip
    text = "".join(f"<tool_call>{one['name']}{each}</tool_call>" for one, each in zip(calls, pairs, strict=True))
    return reply.content + text + ("<|observation|>" if calls else "<|user|>")


def play(policy, chat: TokenChat, task: Task, reset: Callable[[Task], Episode]) -> Rollout:
    """One rollout."""
    harness = Harness(policy, LocalWorkers(reset), chat)  # pyright: ignore[reportArgumentType]
    ((rollout,),) = asyncio.run(harness.play(task, 7, 1))
    return rollout


WAYS = {
    "none": {},
    "keep-recent": {"keep_recent": 5},
    "keep-recent, each turn": {"keep_recent": 5, "fold_at": 6},
    "discard-all": {"discard_above": 2000},
    "both": {"keep_recent": 5, "discard_above": 1600},
    "compaction": {"compact_below": 1000},
}
LENGTHS = {"none": 16_384, "compaction": 3000}
NUM_CALLS = 36


def looked_up(policy_cfg: Rollouts) -> tuple[Rollout, ScriptedPolicy]:
    """A task of the search environment whose policy reads NUM_CALLS pages before it answers."""
    search = make("search", WITHIN)
    task = search.task(0, 2)
    tasks = [search.task(seed, 2) for seed in range(1, 30)]
    wandering = [Reply("Next I look here.", tool_calls=[each]) for one in tasks for each in one.data["calls"]
                 if each["function"]["name"] != "python"]  # fmt: skip
    script = [said(one) for one in [*wandering[:NUM_CALLS], *search.oracle(task)[-1:]]]
    chat = TokenChat(ChatTemplate.bundled("glm-5.2", _tokenizer(tuple(task.messages[0]["content"] for task in tasks))))
    policy = ScriptedPolicy(
        policy_cfg, chat, script, "I looked at pages of people, companies and novels. " * 6 + "<|user|>"
    )
    return play(policy, chat, task, search.reset), policy


def _tokenizer(texts: tuple[str, ...]):
    episodes = []
    search = make("search", WITHIN)
    for seed in range(60):
        task = search.task(seed, 2)
        episode = search.reset(task)
        for each in task.data["calls"]:
            episodes += [m["content"] for m in episode.step(Reply("", tool_calls=[each])).messages]
    return train_bpe([*texts, *episodes, repr(search.task(0, 2).tools)], 3000)


def computed_in_training(rollout: Rollout) -> tuple[int, int]:
    """Tokens of a rollout's sequences, and how many of them a pass that shares prefixes computes."""
    sequences = sequences_of(rollout, 1.0, 1, PRESETS["dis"].reduction)
    lengths = [len(one) for one in sequences]
    found = Prefixes.of(np.concatenate([one.ids for one in sequences]), lengths)
    return sum(lengths), sum(lengths) - found.num_saved


def computed_in_engine(seen: Sequence[tuple[list[int], list[int]]]) -> int:
    """Prompt tokens that an engine computes which finds whole pages of earlier sequences again."""
    total, before = 0, list[list[int]]()
    for prompt, reply in seen:
        shared = max((sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(prompt, one, strict=False)))
                      for one in before), default=0)  # fmt: skip
        total += len(prompt) - min(shared, len(prompt) - 1) // PAGE * PAGE
        before.append([*prompt, *reply])
    return total


def main() -> None:
    columns = ("replies", "forks", "longest", "prompts", "engine", "trained", "passes", "computed", "per trained")
    print(f"{'way':23}", *(f"{one:>11}" for one in columns))
    for name, way in WAYS.items():
        given = {"max_tokens": 256, "max_model_len": LENGTHS.get(name, 8192), "context": way or None}
        rollout, policy = looked_up(Rollouts.model_validate(given))
        assert rollout.reward == 1.0, rollout.failure_reason
        tokens, computed = computed_in_training(rollout)
        trained, prompts = rollout.tree.num_sampled, [len(prompt) for prompt, _ in policy.seen]
        assert trained == sum(len(reply) for _, reply in policy.seen)
        assert abs(computed / trained / rollout.metrics.get("computed_per_trained", computed / trained) - 1) < 0.05
        counts = [len(policy.seen), len(rollout.tree.leaves()) - 1, max(prompts), sum(prompts)]
        counts += [computed_in_engine(policy.seen), trained, tokens, computed]
        print(f"{name:23}", *(f"{one:11,}" for one in counts), f"{computed / trained:11.2f}")


if __name__ == "__main__":
    main()
