"""Rollouts as rows for supervised fine-tuning: the best and distinct ones, failed turns as context alone."""

import json
from itertools import pairwise

import pytest

from glm5.chat.template import ChatTemplate
from glm5.cli.main import main
from glm5.common.errors import DataError
from glm5.config.rl import Rollouts
from glm5.config.rl_records import RLExportConfig
from glm5.rl.environments.protocol import Task
from glm5.rl.export import export, failed_replies, kept_of
from glm5.rl.records.store import RecordWriter
from glm5.rl.rollout import Group, Rollout
from glm5.rl.rollouts.chat import TokenChat
from glm5.rl.rollouts.conversation import Conversation
from glm5.rl.rollouts.guard import DUMMY
from glm5.rl.segments import Segment
from glm5.train.data.chat import examples_of
from tests.support.conversations import assistant, user
from tests.support.tokenizers import tiny_tokenizer

TEMPLATE = ChatTemplate.bundled("glm-5.2", tiny_tokenizer())
CALL = {"id": "1", "type": "function", "function": {"name": "run", "arguments": "{}"}}


def tool(text):
    return {"role": "tool", "tool_call_id": "1", "content": text}


def rollout(*messages, reward=1.0, task=1, **values) -> Rollout:
    """Of these messages; a segment each."""
    made = Rollout(Task("guess", task, 0, (user("q"),), {"n": task}), task, messages=list(messages), **values)
    made.rewards = {"hit": reward}
    leaf = None
    for number, one in enumerate(messages):
        ids = [number, number]
        is_reply = one["role"] == "assistant"
        leaf = made.tree.add(Segment(ids, leaf, is_reply, [-0.1] * 2 * is_reply, [0] * 2 * is_reply))
    return made


def write_run(out, *groups):
    for step, rollouts in enumerate(groups, 1):
        own = [Group(step, one.task, [one]) for one in rollouts]
        columns = [[[None] * len(each.tree.segments) for each in group.rollouts] for group in own]
        RecordWriter(out, 2**30, 1).write(step, 9, {"w": "0"}, own, columns)


def exported(tmp_path, **values):
    export(RLExportConfig(folder=str(tmp_path), out=str(tmp_path / "rows.jsonl"), **values))
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("messages", "values", "failed"),
    [
        ([user("q"), assistant("", None, CALL), tool("error: no tool"), assistant("b")], {}, [1]),
        ([user("q"), assistant("", None, CALL), tool("an error: none"), assistant("b")], {}, []),
        ([user("q"), assistant("a"), user("error"), assistant("b"), user("errors are fine"), assistant("c")], {}, [1]),
        ([user("q"), assistant("", None, CALL), tool("12\nended by: time"), assistant("b")], {}, [1]),
        ([user("q"), assistant("", None, CALL), tool(DUMMY), assistant("b")], {"metrics": {"hack_blocked": 1.0}}, [1]),
        ([user("q"), assistant("", None, CALL), tool(DUMMY), assistant("b")], {}, []),
        ([user("q"), assistant("", None, CALL, CALL), tool("12"), tool("error: x"), assistant("b")], {}, [1]),
        ([user("q"), assistant("a"), user("go on"), assistant("b")], {"is_truncated": True}, [3]),
        ([user("q"), assistant("a"), user("go on"), assistant("b")], {"failure": "tool"}, [3]),
    ],
)
def test_which_turns_failed(messages, values, failed):
    assert sorted(failed_replies(rollout(*messages, **values))) == failed


def test_the_best_distinct_rollouts_of_a_task_over_all_steps(tmp_path):
    short, long, same, low, other = (
        rollout(user("q"), assistant("short")),
        rollout(user("q"), assistant("a"), user("go on"), assistant("long")),
        rollout(user("q"), assistant("short")),
        rollout(user("q"), assistant("low"), reward=0.5),
        rollout(user("q"), assistant("other"), task=2, reward=2.0),
    )
    endless = rollout(user("q"), assistant("endless"), reward=float("inf"))
    broken = rollout(user("q"), assistant("x"), failure="sandbox")
    write_run(tmp_path, [long, low, endless, broken], [short, same, other])
    said = [row["messages"][-1]["content"] for row in exported(tmp_path)]
    assert said == ["short", "long", "other"]
    assert [row["messages"][-1]["content"] for row in exported(tmp_path, best=1)] == ["short", "other"]
    assert len(exported(tmp_path, min_reward=0.5)) == 4
    assert [row["messages"][-1]["content"] for row in exported(tmp_path, last_steps=1)] == ["short", "other"]
    before = (tmp_path / "rows.jsonl").read_bytes()
    with pytest.raises(DataError, match="none of 7 rollouts has a reward of 3 or more"):
        exported(tmp_path, min_reward=3.0)
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    with pytest.raises(DataError, match="there are no records"):
        export(RLExportConfig(folder=str(tmp_path / "none"), out=str(tmp_path / "x")))


def test_failed_turns_are_context_and_the_rest_is_learnt(tmp_path, capsys):
    failing = [user("q"), assistant("crash"), user("error"), assistant("fine")]
    write_run(tmp_path, [rollout(*failing), rollout(user("q"), assistant("cut"), is_truncated=True)])
    out = tmp_path / "rows.jsonl"
    assert main(["rl", "export", str(tmp_path), "--out", str(out)]) == 0
    said = f"{out}: 1 rows of 1 rollouts, the best of 2 in 1 steps; 2 turns, 1 of them failed"
    assert f"wrote {said}" in capsys.readouterr().out
    assert main(["rl", "export", str(tmp_path), "--out", str(out)]) == 0
    assert f"replaced {said}" in capsys.readouterr().out
    (row,) = map(json.loads, out.read_text().splitlines())
    assert [one.get("weight", 1) for one in row["messages"]] == [1, 0, 1, 1]
    (found,) = examples_of(row, TEMPLATE, "row")
    learnt = TEMPLATE.tokenizer.decode([one for one, mark in zip(found.ids, found.marks, strict=True) if mark])
    assert "fine" in learnt
    assert "crash" not in learnt
    (plain,) = examples_of({"messages": failing, "thinking": "preserved"}, TEMPLATE, "row")
    assert found.ids == plain.ids, "what failed is read"


@pytest.mark.parametrize("thinks", [False, True])
def test_rows_have_the_tokens_that_the_policy_saw(thinks):
    """Rendered by the template, a conversation is what the rollout's tree holds."""
    chat = TokenChat(TEMPLATE, enable_thinking=thinks)
    made = Rollout(Task("guess", 1, 0, (user("q"),), {}), 1)
    conversation = Conversation(made, chat, Rollouts(max_tokens=8, max_model_len=256))
    thought = "a" if thinks else None
    for asked, answer in (("the weather", "fine"), ("and", "is")):
        conversation.hear([user(asked)])
        text = f"{thought}</think>{answer}" if thinks else answer
        ids = [*TEMPLATE.tokenizer.encode(text), *TEMPLATE.tokenizer.encode("<|user|>")]
        conversation.add(Segment(ids, is_sampled=True, logprobs=[-1.0] * len(ids), versions=[0] * len(ids)))
        made.messages.append(assistant(answer, thought))
    (row,) = kept_of(made, 1.0).rows
    (found,) = examples_of(row, TEMPLATE, "row")
    leaf = made.tree.leaves()[0]
    assert found.ids == made.tree.token_ids(leaf)
    assert sum(found.marks) == made.tree.num_sampled


def test_thinking_is_kept_or_left_out_by_turn():
    turns = [
        one for n in range(200) for one in (user(str(n)), assistant("a", "t", CALL), tool("1"), assistant("b", "t"))
    ]
    made = rollout(*turns)
    for share, least, most in ((1.0, 200, 200), (0.0, 0, 0), (0.3, 40, 80)):
        (row,) = kept_of(made, share).rows
        thinks = ["reasoning_content" in one for one in row["messages"] if one["role"] == "assistant"]
        assert all(a == b for a, b in list(pairwise(thinks))[::2]), "a turn thinks throughout or not at all"
        assert least <= sum(thinks[::2]) <= most
    assert kept_of(made, 0.3) == kept_of(made, 0.3)


def test_of_an_edited_history_every_reply_is_learnt_once():
    made = rollout(user("q"), assistant("a"), user("error"), assistant("b"))
    tree = made.tree
    branch = tree.add(Segment([7], 1))  # behind the first reply
    tree.add(Segment([8, 8], branch, True, [-0.1] * 2, [0, 0]))
    made.messages += [user("again"), assistant("c")]
    rows = kept_of(made, 1.0).rows
    assert rows == [
        {"token_ids": [0, 0, 1, 1, 2, 2, 3, 3], "loss_mask": [0, 0, 0, 0, 0, 0, 1, 1]},
        {"token_ids": [0, 0, 1, 1, 7, 8, 8], "loss_mask": [0, 0, 0, 0, 0, 1, 1]},
    ]
    made.messages.pop()
    assert kept_of(made, 1.0).rows == [], "no reply is matched with tokens of another"
