"""Long conversations: what the policy sees after each way to shorten them, and that every reply is trained as sampled.

With an engine, log-probabilities are compared for equality. The controls: copies that count as sampled, replies that
are tokenized again, and results that are kept.
"""

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
import torch

from glm5.chat.template import ChatTemplate
from glm5.common.errors import ConfigError
from glm5.config.rl import Rollouts
from glm5.engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.rl.algorithms.table import PRESETS
from glm5.rl.environments.protocol import Reply, Task
from glm5.rl.environments.table import make
from glm5.rl.environments.tool_use import call, function_tool
from glm5.rl.loop import run
from glm5.rl.replay import replay
from glm5.rl.rollout import Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.conversation import GO_ON, OMITTED, REQUEST, Conversation
from glm5.rl.rollouts.engines import Engines
from glm5.rl.rollouts.policy import Policy
from glm5.rl.training.exact import ExactPass
from glm5.rl.training.prefixes import Prefixes
from glm5.rl.training.sequences import sequences_of
from tests.support.chatty import TURNS as TURNS_OF_CHATTY
from tests.support.exact import num_unlike
from tests.support.long_conversations import ScriptedPolicy, Talking, play, result, said
from tests.support.models import random_model
from tests.support.rl_recipe import small_recipe
from tests.support.tokenizers import tiny_tokenizer
from tests.support.whole_runs import steps_of

QUESTION = {"role": "user", "content": "What is it?"}
TASK = Task("talk", 0, 0, (QUESTION,), {}, (function_tool("look", "", at="a"),))
CHAT = TokenChat(ChatTemplate.bundled("glm-5.2", tiny_tokenizer()))
TURNS = 8


def settings(context: dict | None, **more) -> Rollouts:
    return Rollouts.model_validate({"max_tokens": 64, "max_model_len": 4096, "context": context} | more)


def reply(number: int) -> dict:
    return {
        "role": "assistant",
        "content": "so",
        "tool_calls": [call("look", at=str(number)) | {"id": f"call-{number}"}],
    }


def folded(number: int) -> dict:
    return result(number, OMITTED)


def steps(*numbers: int, left_out: int = 0) -> list[dict]:
    """Messages of steps, the results of the first ones left out."""
    return [one for n in numbers for one in (reply(n), folded(n) if n <= left_out else result(n))]


def scripted(
    context: dict | None, turns: int = TURNS, say=lambda n: [result(n)], **more
) -> tuple[ScriptedPolicy, Rollout]:
    """An episode with that many calls, whose replies are scripted."""
    script = [said(Reply("so", tool_calls=reply(n)["tool_calls"])) for n in range(1, turns + 1)] + ["done<|user|>"]
    policy = ScriptedPolicy(settings(context, **more), CHAT, script, "a summary<|user|>")
    return policy, play(policy, CHAT, TASK, lambda task: Talking(task, turns, say))


def seen(*given, **more) -> tuple[list[list[int]], Rollout]:
    """The prompts of such an episode."""
    policy, rollout = scripted(*given, **more)
    assert Counter(map(repr, sampled_of(rollout))) == Counter(map(repr, policy.seen))
    return [prompt for prompt, _ in policy.seen], rollout


def sampled_of(rollout: Rollout) -> list[tuple[list[int], list[int]]]:
    """Of each sampled segment the tokens before it, and its own."""
    tree = rollout.tree
    parts = [(tree.path(index)[:-1], one) for index, one in enumerate(tree.segments) if one.is_sampled]
    return [([i for at in path for i in tree.segments[at].token_ids], one.token_ids) for path, one in parts]


def prompt(*messages: dict) -> list[int]:
    return CHAT.prompt([QUESTION, *messages], TASK.tools)


def test_nothing_is_edited_by_default():
    prompts, rollout = seen(None)
    assert prompts == [prompt(*steps(*range(1, n + 1))) for n in range(TURNS + 1)]
    assert len(rollout.tree.leaves()) == 1
    assert "forks" not in rollout.metrics


def test_results_are_left_out_in_blocks():
    prompts, rollout = seen({"keep_recent": 2, "fold_at": 4}, system="Be brief.")
    left_out, system = [0, 0, 0, 0, 2, 2, 4, 4, 6], {"role": "system", "content": "Be brief."}
    assert prompts == [
        CHAT.prompt([system, QUESTION, *steps(*range(1, n + 1), left_out=m)], TASK.tools)
        for n, m in enumerate(left_out)
    ]
    assert rollout.metrics["forks"] == 3
    assert rollout.reward == 1.0


def test_the_conversation_begins_again():
    limit = len(prompt(*steps(1, 2, 3))) - 1
    prompts, rollout = seen({"discard_above": limit})
    assert prompts == [prompt(*steps(*range(n - n % 3 + 1, n + 1))) for n in range(TURNS + 1)]
    assert rollout.metrics["forks"] == 2


def test_both():
    limit = len(prompt(*steps(1, 2, 3, 4, 5, left_out=3))) - 1
    prompts, _ = seen({"keep_recent": 1, "fold_at": 2, "discard_above": limit})
    left_out = [0, 0, 1, 2, 3]
    first = [prompt(*steps(*range(1, n + 1), left_out=m)) for n, m in enumerate(left_out)]
    assert prompts[:5] == first
    assert prompts[5] == first[0]  # step 5 was one too much
    assert prompts[6] == prompt(*steps(6))


def test_the_policy_summarizes():
    """The question, the summary as it was sampled, and as many of the last steps as fit."""
    ask, go_on = ({"role": "user", "content": text} for text in (REQUEST, GO_ON))
    summary = {"role": "assistant", "content": "a summary"}
    full = len(prompt(*steps(1, 2, 3, 4))) - 1
    prompts, rollout = seen({"compact_below": 200}, max_model_len=full + 200)
    assert prompts[:4] == [prompt(*steps(*range(1, n + 1))) for n in range(4)]
    assert prompts[4] == prompt(*steps(1, 2, 3, 4), ask)
    tails = [n for n in range(3) if len(prompt(summary, go_on, *steps(*range(5 - n, 5)))) <= full]
    assert prompts[5] == prompt(summary, go_on, *steps(*range(5 - tails[-1], 5)))
    assert sum(one.get("content") == REQUEST for one in rollout.messages) <= 3
    assert rollout.num_turns == len(prompts)


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_the_last_steps_follow_the_summary(keep):
    full = len(prompt(*steps(*range(1, 10)))) - 1
    prompts, _ = seen({"compact_below": 200, "keep_steps": keep}, max_model_len=full + 200, turns=10)
    summary, go_on = {"role": "assistant", "content": "a summary"}, {"role": "user", "content": GO_ON}
    assert prompts[10] == prompt(summary, go_on, *steps(*range(10 - keep, 10)))
    assert prompts[11] == prompt(summary, go_on, *steps(*range(10 - keep, 11)))


def test_a_summary_after_so_many_steps():
    prompts, rollout = seen({"compact_every": 3, "max_compactions": 2, "keep_steps": 1}, turns=10)
    ask, go_on = ({"role": "user", "content": text} for text in (REQUEST, GO_ON))
    resumed = [{"role": "assistant", "content": "a summary"}, go_on]
    assert prompts[3] == prompt(*steps(1, 2, 3), ask)
    assert prompts[4] == prompt(*resumed, *steps(3))
    assert prompts[7] == prompt(*resumed, *steps(3, 4, 5, 6), ask)
    assert prompts[8] == prompt(*resumed, *steps(6))
    assert prompts[-1] == prompt(*resumed, *steps(6, 7, 8, 9, 10))
    assert rollout.reward == 1.0


def test_a_frozen_summary_is_context():
    """The control is the same episode whose summaries are trained."""
    keys = {"compact_every": 3, "max_compactions": 2}
    prompts, trained = seen(keys)
    policy, frozen = scripted({**keys, "train_summary": False})
    assert [asked for asked, _ in policy.seen] == prompts
    assert sampled_of(frozen) == [one for one in sampled_of(trained) if CHAT.said("a summary") != one[1]]
    assert len(sampled_of(trained)) == len(sampled_of(frozen)) + 2
    sequences = sequences_of(frozen, 1.0, 1, PRESETS["dis"].reduction)
    assert sum(int((one.columns["policy"] > 0).sum()) for one in sequences) == frozen.tree.num_sampled


def test_a_value_is_carried_by_summaries_alone():
    """The control is the conversation that keeps everything."""
    memory = make("memory")
    task = memory.task(1, 1)
    told = f"<tool_response>{task.data['value']}</tool_response>"
    for context, is_there in (None, True), ({"compact_every": 24}, False):
        script = [f"{one.content}<|user|>" for one in memory.oracle(task)]
        policy = ScriptedPolicy(settings(context), CHAT, script, "?<|user|>")
        assert play(policy, CHAT, task, memory.reset).reward == 1.0
        last, _ = policy.seen[-1]
        assert (told in CHAT.tokenizer.decode(last)) == is_there


def test_compactions_are_bounded():
    full = len(prompt(*steps(1, 2, 3, 4, 5, 6)))
    _, rollout = seen({"compact_below": 200, "max_compactions": 1}, max_model_len=full + 150, turns=40)
    assert sum(one.get("content") == REQUEST for one in rollout.messages) == 1
    assert rollout.is_truncated
    assert rollout.reward == 0


def test_what_a_user_says_stays():
    """Only what follows the last message that is no tool's is shortened."""
    also = {"role": "user", "content": "And now?"}
    prompts, _ = seen({"keep_recent": 1, "fold_at": 2}, say=lambda n: [result(n), *([also] if n == 3 else [])])
    start = [*steps(1, 2, 3, left_out=1), also]
    assert prompts[3] == CHAT.prompt([QUESTION, *start], TASK.tools)
    assert prompts[6] == CHAT.prompt([QUESTION, *start, *steps(4, 5, 6, left_out=5)], TASK.tools)


def test_keeping_results_is_noticed(monkeypatch):
    monkeypatch.setattr("glm5.rl.rollouts.conversation.OMITTED", "it is kept")
    prompts, _ = seen({"keep_recent": 2, "fold_at": 4})
    assert prompts[4] != prompt(*steps(1, 2, 3, 4, left_out=2))


WAYS = {
    "keep-recent": {"context": {"keep_recent": 1, "fold_at": 3}},
    "discard-all": {"context": {"discard_above": 470}},
    "both": {"context": {"keep_recent": 1, "fold_at": 2, "discard_above": 520}},
    "compaction": {"context": {"compact_below": 250}, "max_model_len": 720},
}


class Watched(Policy):
    """A policy that remembers prompts and replies."""

    def __init__(self, *given):
        super().__init__(*given)
        self.seen = list[tuple[list[int], list[int]]]()

    async def reply(self, prompt_ids, seed, key):
        asked = list(prompt_ids)
        sampled = await super().reply(asked, seed, key)
        self.seen.append((asked, sampled.token_ids))
        return sampled


def scored(rollout: Rollout, exact: ExactPass) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each trained token what the training pass makes of it, and what the engine said."""
    sequences = sequences_of(rollout, 1.0, 1, PRESETS["dis"].reduction)
    lengths = [len(one) for one in sequences]
    ids = torch.cat([torch.from_numpy(one.ids) for one in sequences])
    policy = torch.cat([torch.from_numpy(one.columns["policy"]) for one in sequences])
    reported = torch.cat([torch.from_numpy(one.columns["rollout"]) for one in sequences]).float()
    place = (policy > 0).nonzero()[:, 0]
    with torch.no_grad():
        hidden = exact.hidden(ids, lengths)[place - 1]
        found = exact.logprobs(hidden, exact.model.lm_head.weight, ids[place], torch.ones(len(place)))[0]
    return found, reported[place]


@pytest.mark.parametrize("way", WAYS)
def test_every_reply_is_trained_once_with_the_engines_bits(way, seed, monkeypatch):
    model = random_model(seed)
    cfg = Rollouts.model_validate({"max_tokens": 6, "max_model_len": 1024} | WAYS[way])
    options = {"max_model_len": cfg.max_model_len, "deterministic": True, "num_threads": 1}
    engines = Engines(lambda _: AsyncEngine(LLM(model, max_num_seqs=2, max_num_batched_tokens=64, **options)))
    engines.start()
    try:
        (engine,) = engines.alive

        def rollout_of() -> tuple[Rollout, Watched]:
            policy = Watched(engines, cfg)
            return play(policy, CHAT, TASK, lambda task: Talking(task, TURNS, lambda n: [result(n)])), policy

        rollout, policy = rollout_of()
        hits = asyncio.run(engine.stats())["prefix_cache"]["hit_tokens"]["device"]
        exact = ExactPass(model, threads=1)
        exact.check(engine.info.arithmetic)
        # A control: copies of replies that count as sampled.
        copied = Conversation._copy
        monkeypatch.setattr(Conversation, "_copy", copy_as_sampled)
        twice, _ = rollout_of()
        monkeypatch.setattr(Conversation, "_copy", copied)
    finally:
        asyncio.run(engines.close())
    assert hits > 0
    assert rollout.metrics["forks"] >= 2
    assert rollout.reward == 1.0
    assert sorted(policy.seen) == sorted(sampled_of(rollout))  # each reply once, after the tokens that the engine saw
    found, reported = scored(rollout, exact)
    assert len(found) == rollout.tree.num_sampled == sum(len(ids) for _, ids in policy.seen)
    assert num_unlike(found, reported) == 0
    if way != "discard-all":  # where nothing is copied
        found, reported = scored(twice, exact)
        assert len(found) > twice.tree.num_sampled - 1
        assert num_unlike(found, reported) > 0
    print(f"{way}: {rollout.metrics}")


@pytest.mark.long
def test_a_run_whose_conversations_are_shortened_is_exact(tmp_path):
    keys = {"keep_recent": 1, "fold_at": 3, "discard_above": 500}
    changes = ['environment.0.name="tests.support.chatty:Chatty"', "rollouts.max_model_len=1024", "steps=2"]
    run(small_recipe(tmp_path, *changes, *(f"rollouts.context.{key}={value}" for key, value in keys.items())))
    lines = steps_of(tmp_path / "run")
    print(*lines, sep="\n")
    assert all(line["logp/abs_diff_max"] == 0 for line in lines)
    assert all(line["metric/forks"] >= 2 for line in lines)
    assert all(line["turns/mean"] == TURNS_OF_CHATTY + 1 for line in lines)
    assert all(not one.tensors for one in replay(tmp_path / "run", 2))


def copy_as_sampled(self: Conversation, segment: int) -> int:
    return self.add(replace(self.rollout.tree.segments[segment]))


def test_the_figure_is_what_a_pass_over_the_tree_computes():
    """But for the first tokens that two results have in common, of which a pass computes fewer."""
    _, rollout = seen({"keep_recent": 2, "fold_at": 4})
    sequences = sequences_of(rollout, 1.0, 1, PRESETS["dis"].reduction)
    ids = torch.cat([torch.from_numpy(one.ids) for one in sequences]).numpy()
    computed = len(Prefixes.of(ids, [len(one) for one in sequences]).place_U)
    figure = rollout.metrics["computed_per_trained"] * rollout.tree.num_sampled
    assert 0 <= figure - computed <= 40 * rollout.metrics["forks"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), "give keep_recent, discard_above or both"),
        (("keep_recent=5", "compact_below=100"), "give keep_recent, discard_above or both"),
        (("discard_above=100", "fold_at=9"), "fold_at has no effect without keep_recent"),
        (("keep_recent=5", "keep_steps=1"), "keep_steps has no effect without compact_below or compact_every"),
        (("keep_recent=5", "train_summary=false"), "train_summary has no effect without"),
        (("compact_below=100", "compact_every=9"), "compact_below or compact_every alone"),
        (("keep_recent=5", "fold_at=5"), "fold_at 5 must be above keep_recent 5"),
        (("discard_above=128",), "context.discard_above 128 must be below max_model_len 128"),
        (("keep=5",), "no such key"),
    ],
)
def test_settings_that_do_not_fit_are_named(keys, said, tmp_path):
    changes = [f"rollouts.context.{one}" for one in keys] or ["rollouts.context={}"]
    with pytest.raises(ConfigError, match=said):
        small_recipe(tmp_path, *changes)


def test_an_agent_edits_its_own_conversation(tmp_path):
    with pytest.raises(ConfigError, match="an agent edits its conversation itself"):
        small_recipe(tmp_path, "rollouts.context.keep_recent=5", 'agent.command=["true"]')
