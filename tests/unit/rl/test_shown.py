"""What a new model is taught on: solutions, of the tasks that the recipe names, whoever makes them."""

from itertools import islice

import pytest

from glm5.common.errors import ConfigError
from glm5.rl import shown as shown_games
from glm5.rl.build import PolicyBuilder
from glm5.rl.environments.boxes import Boxes
from glm5.rl.environments.play import play_oracle, play_solution
from glm5.rl.environments.table import make
from glm5.rl.rollouts.conversation import GO_ON, REQUEST
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.shown import shown_examples
from tests.support.rl_recipe import small_recipe

DOMAINS = 'environment=[{name="math",shown={first_task=7,tasks=2}},{name="code"},{name="tools"}]'


@pytest.fixture
def builder(tmp_path) -> PolicyBuilder:
    return PolicyBuilder(small_recipe(tmp_path, DOMAINS, "model.config.vocab_size=600"), tmp_path)


def test_a_solution_is_the_episode_without_its_score():
    for name in ("math", "science", "tools"):
        environment = make(name)
        for seed in range(6):
            task = environment.task(seed, 0)
            assert play_solution(environment, task) == play_oracle(environment, task).conversations


def test_replies_of_the_named_tasks_are_marked(builder):
    with shown_examples(builder.recipe, builder.assets) as shown:
        examples = list(islice(shown, 12))
    said = [
        builder.tokenizer.decode([i for i, mark in zip(ids, marks, strict=True) if mark]) for ids, marks in examples
    ]
    math, code, tools = (make(name) for name in ("math", "code", "tools"))
    # By weight, and the seed is the number: math 0, code 1, math 2, tools 3.
    assert said[0] == f"{math.oracle(math.task(7, 0))[0].content}<|user|>"
    assert code.task(1, 0).data["source"] in said[1]
    assert said[5] == f"{math.oracle(math.task(8, 0))[0].content}<|user|>"
    (call,) = tools.task(3, 0).data["calls"]
    assert f"<tool_call>{call['function']['name']}" in said[3]
    prompt = builder.tokenizer.decode(examples[3][0])
    assert "<|system|>A game<|user|>" in prompt
    assert len(examples[3][0]) < len(prompt) / 3  # the tokenizer has learnt the list of tools


def test_summaries_are_shown_with_random_words(tmp_path):
    """Each reply once, where a rollout would have it; a summary says one of the values, whichever is to be kept."""
    settings = 'environment=[{name="memory",shown={first_task=0,level=1}}]', "rollouts.context={compact_every=24}"
    of_memory = PolicyBuilder(small_recipe(tmp_path, *settings, "model.config.vocab_size=400"), tmp_path)
    with shown_examples(of_memory.recipe, of_memory.assets) as shown:
        examples = list(islice(shown, 32))
    decode, summaries = of_memory.tokenizer.decode, list[str]()
    for (before, marks), (after, marks_after) in zip(examples[::2], examples[1::2], strict=True):
        told = decode([i for i, mark in zip(before, marks, strict=True) if mark])
        assert told[: -len("a<|user|>")] == "ok<|user|>" * 24
        assert decode(before).count(REQUEST) == 1
        summaries.append(told.removesuffix("<|user|>")[-1])
        assert f"{summaries[-1]}<|user|>{GO_ON}" in decode(after)
        assert sum(marks_after) == sum(marks) - 2 * 20
    assert set(summaries) == set("ab")
    assert set(summaries[::2]) == set("ab")  # of tasks with one value


def test_programs_of_solutions_run_in_boxes(tmp_path, monkeypatch):
    monkeypatch.setattr(shown_games, "TOKENIZER_GAMES", 2)
    monkeypatch.setattr(shown_games, "AT_A_TIME", 2)
    recipe = small_recipe(tmp_path, 'environment=[{name="tools",level=2}]', "model.config.vocab_size=600")
    builder = PolicyBuilder(recipe, tmp_path)
    with shown_examples(recipe, builder.assets) as shown:
        ids, _ = next(shown)
    task = make("tools").task(0, 2)
    played = play_oracle(make("tools", Boxes.of(choose_backend())), task)
    assert played.rewards == [1.0]
    (result,) = [one["content"] for one in played.conversations[0] if one["role"] == "tool"]
    assert f"<tool_response>{result}</tool_response>" in builder.tokenizer.decode(ids)


def test_what_only_a_sandbox_can_play_is_refused_without_one(tmp_path, monkeypatch):
    def none():
        raise ConfigError("no sandbox works here")

    monkeypatch.setattr(shown_games, "choose_backend", none)
    recipe = small_recipe(tmp_path, 'environment=[{name="tools",level=2}]', "model.config.vocab_size=600")
    with pytest.raises(
        ConfigError, match=r"environment tools: level 2 cannot be shown to a new model: no sandbox .*; allowed: a lower"
    ):
        PolicyBuilder(recipe, tmp_path)


@pytest.mark.slow
def test_processes_make_what_one_does(builder):
    recipe = builder.recipe.model_copy(update={"workers": 2})
    with shown_examples(builder.recipe, builder.assets) as alone, shown_examples(recipe, builder.assets) as together:
        assert list(islice(alone, 150)) == list(islice(together, 150))
