"""Forms of rows: a training step on each learns exactly the text that the guide says; the others are named."""

import json
import re
from pathlib import Path

import pytest

from glm5.chat.template import ChatTemplate
from glm5.common.errors import DataError
from glm5.train.build import Builder
from glm5.train.data.chat import examples_of
from glm5.train.data.forms import kind_of_row
from glm5.train.data.pairs import pair_of
from glm5.train.stage_trainer import StageTrainer
from tests.support.conversations import assistant, user
from tests.support.tokenizers import tiny_tokenizer
from tests.support.training import recipe, same, stage

GUIDE = Path(__file__).parents[4] / "docs" / "train.md"
DATA = '[{kind = "files", files = ["NAME.jsonl"], held_out = 0}]'
ENDS = ("<|user|>", "<|observation|>", "<|endoftext|>")


def documented() -> list[tuple[dict, list[str]]]:
    """Rows of the guide's table, and the texts that are learnt of each."""
    table = GUIDE.read_text(encoding="utf-8").partition("### Rows")[2].partition("\n- ")[0]
    lines = [line.split(" | ") for line in table.splitlines() if "`{" in line]
    return [(json.loads(re.findall(r"`(.*)`", line[1])[0]), re.findall(r"`([^`]+)`", line[2])) for line in lines]


def learnt(batch) -> list[str]:
    """The runs of tokens with a loss weight, as text without the token that ends them."""
    runs: list[list[int]] = [[]]
    for token_id, weight in zip(batch.ids_T.tolist(), batch.weight_T.tolist(), strict=True):
        if weight:
            runs[-1].append(token_id)
        elif runs[-1]:
            runs.append([])
    texts = [tiny_tokenizer().decode(one) for one in runs if one]
    return [next((text.removesuffix(end) for end in ENDS if text.endswith(end)), text) for text in texts]


def test_a_step_on_each_form_learns_what_the_guide_says(tmp_path):
    rows = documented()
    assert len(rows) == 12
    tiny_tokenizer().save(tmp_path / "tokenizer")
    stages = []
    for i, (row, _) in enumerate(rows):
        (tmp_path / f"form{i}.jsonl").write_text(json.dumps(row) + "\n")
        one = stage(f"form{i}", "dpo" if kind_of_row(row) == "a pair" else "sft", steps=1)
        stages.append(one.replace('[{kind = "needle"}]', DATA.replace("NAME", f"form{i}")).replace("= 64", "= 400"))
    of = recipe(tmp_path, "out", *stages, settings=[f"model.tokenizer={tmp_path / 'tokenizer'}"])
    trainer = StageTrainer(of, builder := Builder(of, tmp_path, tmp_path / "out"), None)
    for one, (row, texts) in zip(of.stage, rows, strict=True):
        step, drawn = trainer.begin(one, builder.cfg, None), [builder.rows(one).row(0)]
        trainer.prepare(one, drawn, 1, is_start=True)
        (batch,) = trainer.batches(one, drawn)
        before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
        assert step.run([batch], one.lr)["loss"] > 0
        assert "lm_head.weight" not in same(before, trainer.model.state_dict())
        print(f"{json.dumps(row):.100} -> {learnt(batch)}")
        assert learnt(batch) == texts


def template():
    return ChatTemplate.bundled("glm-5.2", tiny_tokenizer())


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"conversations": "a"}, "conversations must be a list of at least one turn, got 'a'"),
        ({"conversations": []}, "conversations must be a list"),
        ({"conversations": [{"from": "king", "value": "a"}]}, "message 0: from: got 'king'; allowed: human, user, gpt"),
        ({"conversations": [{"from": "human", "value": 5}]}, "message 0: value: got 5; allowed: a text"),
        (
            {"conversations": [{"from": "function_call", "value": "f(x)"}]},
            "message 0: value of function_call: not JSON",
        ),
        ({"conversations": [{"from": "function_call", "value": "[5]"}]}, r"tool_calls\[0\]"),
        ({"conversations": [{"speaker": "gpt", "text": "a"}]}, r"messages\[0\]"),
        ({"messages": [user("a"), assistant("b")], "tools": "[{"}, "tools: not JSON"),
        ({"messages": [user("a"), assistant("b")], "tools": "[" * 5000}, "tools: not JSON"),
        ({"prompt": [], "completion": "a"}, r"prompt: got \[\]; allowed: a text, or a list of at least one message"),
        ({"prompt": "a", "completion": 5}, "completion: got 5; allowed: a text, or a list"),
        ({"prompt": "a", "completion": [user("b")]}, "completion begins with role 'user'; allowed: assistant"),
        ({"prompt": "a", "completion": "b", "label": False}, r"a judgement of one answer \(KTO\).*sft.*reward or dpo"),
        ({"prompt": "a", "completion": "b", "tool": []}, "got the key 'tool'; .*'tools'"),
    ],
)
def test_a_form_that_is_none_is_named(row, says):
    assert kind_of_row(row) == "a conversation"
    with pytest.raises(DataError, match=f"row 1: .*{says}"):
        examples_of(row, template(), "row 1")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"input": "a", "preferred_output": "b", "non_preferred_output": "c"},
            "input: got 'a'; allowed: an object with",
        ),
        ({"input": {}, "preferred_output": "b", "non_preferred_output": "c"}, "input: got {}; allowed"),
        ({"conversations": "a", "chosen": "b", "rejected": "c"}, "conversations must be a list"),
    ],
)
def test_a_pair_that_is_none_is_named(row, says):
    assert kind_of_row(row) == "a pair"
    with pytest.raises(DataError, match=f"row 1: .*{says}"):
        pair_of(row, template(), "row 1")


def test_null_counts_as_absent():
    """Tables, and JSON written from them, have every key in every row."""
    row = {"messages": [user("a"), assistant("b")], "thinking": "off"}
    keys = ("token_ids", "loss_mask", "tools", "chosen", "rejected", "conversations", "prompt", "completion", "label")
    nulls = [{**dict.fromkeys(("loss", "weight", "name", "tool_calls"), None), **one} for one in row["messages"]]
    full = {**dict.fromkeys(keys, None), **row, "messages": nulls}
    assert kind_of_row(full) == "a conversation"
    assert examples_of(full, template(), "row") == examples_of(row, template(), "row")
    assert kind_of_row({"text": "a", **dict.fromkeys(keys, None)}) == "a text"


def test_sharegpt_keeps_what_marks_context():
    row = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 0}]}
    assert examples_of(row, template(), "row") == []
