"""Rollouts without an engine: tokens of conversations, groups whose environment fails, groups that are drawn again."""

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from glm5.chat.template import BUNDLED, ChatTemplate
from glm5.chat.tokenizer import train_bpe
from glm5.common.errors import ConfigError, TrainingError
from glm5.rl.environments.protocol import EpisodeFailed, Task
from glm5.rl.rollout import Group, Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.collect import ATTEMPTS, Draw, collect
from glm5.rl.rollouts.refill import refilled
from glm5.rl.segments import Segment, seed_of
from glm5.rl.tasks import REPLACING, TaskSource
from tests.support.rl_recipe import small_recipe

TOKENIZER = train_bpe(["Guess 1 to 15", "lower", "higher", "two plus two", "It is"], 340)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]


def call(number: int) -> dict:
    return {"id": f"call-{number}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {number}}}'}}


def says(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


PLAIN = [
    *(says("system", "Play."), says("user", "Guess 1 to 15"), says("assistant", "8")),
    *(says("user", "lower"), says("assistant", "4"), says("user", "higher\n"), says("assistant", "5")),
]
TOOLED = [
    *(says("user", "two plus two"), says("assistant", "", tool_calls=[call(1)])),
    *(says("tool", "4", tool_call_id="call-1"), says("assistant", "so", tool_calls=[call(2), call(3)])),
    *(says("tool", "5", tool_call_id="call-2"), says("tool", "6", tool_call_id="call-3")),
    *(says("assistant", "It is 4"), says("user", "<|user|> thanks"), says("assistant", "bye")),
]
MODES = [
    (name, thinks)
    for name in BUNDLED
    for thinks in (False, True)
    if (name, thinks) not in {("glm-5.1", True), ("glm-5.3", False)}
]


@pytest.mark.parametrize(("messages", "tools"), [(PLAIN, []), (TOOLED, TOOLS)], ids=["plain", "tools"])
@pytest.mark.parametrize(("name", "thinks"), MODES)
def test_a_conversation_that_grows_is_what_the_template_renders(name, thinks, messages, tools):
    template = ChatTemplate.bundled(name, TOKENIZER)
    chat, options = TokenChat(template, enable_thinking=thinks), {"enable_thinking": thinks, "clear_thinking": False}
    if thinks:
        messages = [one | {"reasoning_content": "hm"} if one["role"] == "assistant" else one for one in messages]
    ids, marks, heard = list[int](), list[bool](), list[dict]()
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            heard.append(message)
            continue
        ids += chat.continuation(heard, tools, ids[-1]) if ids else chat.prompt(heard, tools)
        assert ids == template.encode(messages[:number], tools or None, **options)
        prompt = template.render(messages[:number], tools or None, **options)
        whole = template.render(messages[: number + 1], tools or None, add_generation_prompt=False, **options)
        assert whole.startswith(prompt)
        end = "<|observation|>" if "tool_calls" in message else "<|user|>"
        marks += [False] * (len(ids) - len(marks))
        ids += TOKENIZER.encode(whole.removeprefix(prompt) + end)  # as a policy would say it
        marks += [True] * (len(ids) - len(marks))
        heard = []
    assert chat.conversation(messages, tools) == (ids, marks)


def test_sampled_tokens_are_never_tokenized_again():
    chat = TokenChat(ChatTemplate.bundled("glm-5.2", TOKENIZER))
    odd = [TOKENIZER.encode(letter)[0] for letter in "lower"]  # one token each, which no tokenizer would choose
    assert odd != TOKENIZER.encode("lower")
    assert chat.reply(odd, (), is_truncated=False).content == "lower"
    after = chat.continuation([says("user", "8")], (), odd[-1])
    assert TOKENIZER.decode(after).startswith("<|user|>8<|assistant|>")
    assert chat.continuation([says("user", "8")], (), after[0]) == after[1:]


def test_calls_are_numbered_through_a_conversation_and_equal_replies_are_the_same():
    chat = TokenChat(ChatTemplate.bundled("glm-5.2", TOKENIZER))
    ids = TOKENIZER.encode("<tool_call>add</tool_call><tool_call>add</tool_call>")

    def numbers(num_calls: int, *tools: dict[str, Any]) -> list[str]:
        reply = chat.reply(ids, tools, is_truncated=False, num_calls=num_calls)
        assert reply is chat.reply(ids, tools, is_truncated=False, num_calls=num_calls)
        return [call["id"] for call in reply.tool_calls]

    assert (numbers(0, *TOOLS), numbers(3, *TOOLS)) == (["call_0", "call_1"], ["call_3", "call_4"])
    other = {"type": "function", "function": {"name": "subtract", "parameters": {"type": "object"}}}
    theirs = chat.reply(ids, (other,), is_truncated=False)
    assert theirs is not chat.reply(ids, TOOLS, is_truncated=False)  # types of arguments are those of the tools


@pytest.mark.parametrize(
    ("name", "thinks", "said"),
    [("glm-5.1", True, "glm-5.1: a later turn changes"), ("glm-5.3", False, "rollouts.enable_thinking=false.*true")],
)
def test_a_template_that_does_not_fit_is_refused_at_once(name, thinks, said):
    with pytest.raises(ConfigError, match=said):
        TokenChat(ChatTemplate.bundled(name, TOKENIZER), enable_thinking=thinks)


TASK = Task("guess", 0, 0, (), {})


def rollout(reward: float = 0.0, *, failed: bool = False) -> Rollout:
    found = Rollout(TASK, 0, rewards={"hit": reward})
    found.tree.add(Segment([1], found.tree.add(Segment([2])), is_sampled=True, logprobs=[-0.5], versions=[0]))
    if failed:
        found.failure, found.failure_reason = "environment", "it ended (SIGKILL)"
    return found


class Workers:
    """Fails the first `failing` requests for a task, and all scores of groups if `failing` is below 0."""

    def __init__(self, failing: int) -> None:
        self.failing, self.asked = failing, list[int]()

    def is_quick(self, name: str, level: int) -> bool:
        return name != "slow"

    async def task(self, name: str, seed: int, level: int) -> Task:
        self.failing -= 1
        self.asked.append(seed)
        if self.failing >= 0:
            raise EpisodeFailed("environment", "it ended")
        return TASK

    async def score_group(self, task: Task, rewards: list[float]) -> list[float]:
        if self.failing < -1:
            raise EpisodeFailed("environment", "it ended")
        return [reward + 1 for reward in rewards]


class Harness:
    reward = None

    def __init__(self, failing: int) -> None:
        self.workers = Workers(failing)

    async def play(self, task: Task, seed: int, count: int, on_episode: object, late: object) -> list[list[Rollout]]:
        return [[rollout()] for _ in range(count)]


def collected(failing: int) -> Group:
    (group,) = asyncio.run(collect(Harness(failing), [Draw(0, "guess", 0, 0)], 2, run_seed=0))  # pyright: ignore[reportArgumentType]
    return group


def test_a_task_is_asked_for_again():
    assert [one.reward for one in collected(ATTEMPTS - 1).rollouts] == [1.0, 1.0]
    with pytest.raises(ExceptionGroup) as failed:
        collected(ATTEMPTS)
    assert failed.group_contains(TrainingError, match="environment guess: no task of seed 0, level 0: it ended")


def test_slow_environments_are_asked_first_unless_a_few_groups_go_at_a_time():
    draws = [Draw(number, "slow" if number in (2, 3) else "guess", number, 0) for number in range(5)]
    for concurrency, asked in ((None, [2, 3, 0, 1, 4]), (2, [0, 1, 2, 3, 4])):
        harness: Any = Harness(0)
        groups = asyncio.run(collect(harness, draws, 2, run_seed=0, concurrency=concurrency))
        assert harness.workers.asked == asked
        assert [group.number for group in groups] == [0, 1, 2, 3, 4]


def test_a_group_that_cannot_be_scored_failed():
    assert [one.failure for one in collected(-1).rollouts] == ["environment"] * 2


def refill(folder, *losing: int, fails_again: bool = False) -> tuple[list[list[int]], list[Group]]:
    """Of a step of four groups, of which these fail: the numbers that were drawn together, and the groups."""
    tasks, drawn = TaskSource(small_recipe(folder), {}), list[list[int]]()

    async def play(draws):
        drawn.append([draw.number for draw in draws])
        failing = [draw for draw in draws if draw.number in losing or (fails_again and draw.number >= REPLACING)]
        return [Group(draw.number, TASK, [rollout(failed=draw in failing) for _ in "ab"]) for draw in draws]

    return drawn, asyncio.run(refilled(play, tasks, 2))


def test_dropped_groups_are_drawn_again(tmp_path):
    first = REPLACING + 8
    assert refill(tmp_path)[0] == [[8, 9, 10, 11]]
    assert refill(tmp_path, 9, 10)[0] == [[8, 9, 10, 11], [first, first + 1]]
    drawn, groups = refill(tmp_path, 9, 10, first + 1)
    assert drawn == [[8, 9, 10, 11], [first, first + 1], [first + 2]]
    assert [group.number for group in groups] == [number for numbers in drawn for number in numbers]


def test_groups_are_drawn_again_so_often(tmp_path):
    drawn, groups = refill(tmp_path, 9, fails_again=True)
    assert [len(numbers) for numbers in drawn] == [4, 1, 1, 1, 1]
    assert len(groups) == 8
    with pytest.raises(TrainingError, match=r"none of 8 groups .*\(16 environment\); the first failed by: it ended"):
        refill(tmp_path, 8, 9, 10, 11, fails_again=True)


def test_draws_are_the_same_when_they_are_asked_for_again(tmp_path):
    once, twice = (TaskSource(small_recipe(tmp_path), {}) for _ in "ab")
    for step in range(3):
        twice.draws(step)
        assert once.draws(step) == twice.draws(step)
        assert twice.replacements(step, range(2)) == once.replacements(step, range(2))
        assert twice.replacements(step, range(2)) == once.replacements(step, range(2))
    assert once.state() == twice.state()
    seeds = [seed_of(0, number) for number in range(1000)]
    assert all(one != other for one, other in pairwise(sorted(seeds)))
