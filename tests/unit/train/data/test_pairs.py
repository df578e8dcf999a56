"""Preference pairs: the published layouts give the same tokens, and rows that are no pairs are named."""

import json

import pytest

from glm5.chat.template import ChatTemplate
from glm5.common.errors import DataError
from glm5.train.data.chat import conversation_ids, examples_of
from glm5.train.data.pairs import pair_of
from glm5.train.data.sources import PairRows
from glm5.train.data.tokenize import Options, tokenize
from tests.support.conversations import assistant, user
from tests.support.tokenizers import tiny_tokenizer

TALK = [user("the weather")]
PAIRS = [
    {"prompt": "the weather", "chosen": "fine", "rejected": "in Paris"},
    {"prompt": TALK, "chosen": [assistant("fine")], "rejected": [assistant("in Paris")]},
    {"prompt": "the weather", "chosen": [*TALK, assistant("fine")], "rejected": [*TALK, assistant("in Paris")]},
    {"chosen": [*TALK, assistant("fine")], "rejected": [*TALK, assistant("in Paris")], "score_chosen": 3.0},
]


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.bundled("glm-5.2", tiny_tokenizer())


def test_every_layout_gives_the_same_tokens(template):
    found = [pair_of(row, template, "row") for row in PAIRS]
    assert all(one == found[0] for one in found)
    for answer, example in zip(("fine", "in Paris"), found[0], strict=True):
        row = {"messages": [*TALK, assistant(answer)]}
        assert [example] == examples_of(row, template, "row")
        assert example.ids == conversation_ids(row, template)


def test_only_turns_behind_what_both_share_are_learnt(template):
    shared = [*TALK, assistant("fine"), user("and?")]
    longer = [assistant("a"), user("is"), assistant("b")]
    chosen, rejected = pair_of({"chosen": [*shared, *longer], "rejected": [*shared, assistant("c")]}, template, "row")
    both = examples_of({"messages": [*shared, *longer]}, template, "row")[-1]
    assert chosen.ids == both.ids
    assert sum(chosen.marks) < sum(both.marks)
    only_last = {"messages": [*shared[:1], assistant("fine") | {"weight": 0}, shared[2], assistant("c")]}
    assert [rejected] == examples_of(only_last, template, "row")


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "equal answers"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("c"), assistant("b")]}, "different prompts"),
        ({"chosen": [user("a"), assistant("b")], "rejected": [user("a")]}, "rejected does not end with an assistant"),
        ({"chosen": "b", "rejected": "c"}, "there is no prompt"),
        ({"prompt": "a", "chosen": 3, "rejected": "c"}, "row: chosen: got 3; allowed: a text, or a list"),
        ({"prompt": "a", "chosen": [], "rejected": "c"}, r"row: chosen: got \[\]"),
        ({"promt": "a", "chosen": "b", "rejected": "c"}, "the nearest that means something is 'prompt'"),
        ({"prompt": "a", "chosen": [{"role": "assistent"}], "rejected": "c"}, "chosen does not end with an assistant"),
        (
            {"chosen": [user("a"), assistant("b"), user("c"), assistant("d")], "rejected": [user("a"), assistant("b")]},
            "different prompts: they differ from message 2 on",
        ),
    ],
)
def test_rows_that_are_no_pairs_are_named(template, row, says):
    with pytest.raises(DataError, match=f"row: .*{says}|{says}"):
        pair_of(row, template, "row")


def test_keys_of_published_rows_are_ignored(template):
    row = {"prompt": "a", "chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}
    published = {"prompt_id": "7", "messages": row["chosen"], "score_chosen": 8.0, "score_rejected": 3.0}
    assert pair_of(row | published, template, "row") == pair_of(row, template, "row")


def test_a_weight_of_zero_is_context(template):
    turns = [user("a"), assistant("b"), user("c"), assistant("d")]
    by_weight = [turns[0], turns[1] | {"weight": 0}, turns[2], turns[3] | {"weight": 1}]
    by_loss = [turns[0], turns[1] | {"loss": False}, *turns[2:]]
    found = examples_of({"messages": by_weight}, template, "row")
    assert found == examples_of({"messages": by_loss}, template, "row")
    assert found != examples_of({"messages": turns}, template, "row")
    for wrong, says in (
        ({"weight": 0.5}, r"messages\[1\].weight: got 0.5; allowed: 0 or 1"),
        ({"weight": 0, "loss": True}, "both loss and weight"),
        ({"weight": "0"}, "weight: got '0'"),
        ({"weight": float("nan")}, "weight: got nan"),
    ):
        with pytest.raises(DataError, match=says):
            examples_of({"messages": [turns[0], turns[1] | wrong]}, template, "row")


def test_files_of_pairs_are_recognised_and_packed_in_pairs(tmp_path):
    tiny_tokenizer().save(tmp_path / "tokenizer")
    options = Options(str(tmp_path / "tokenizer"))
    rows = [{"prompt": "the weather", "chosen": "fine " * (1 + i % 4), "rejected": f"{i}"} for i in range(30)]

    def write(name, some):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in some))
        return tmp_path / name

    file = tokenize([write("pairs.jsonl", rows)], tmp_path / "out", options)
    assert file.paired
    assert file.num_documents == 60
    source = PairRows(file, 100, 0, 0.2)
    pairs = [(*source.row(i, "train").lengths,) for i in range(source.size)]
    assert all(len(lengths) % 2 == 0 and sum(lengths) <= 100 for lengths in pairs)
    train, held = ({piece for i in range(len(some)) for piece in some[i]} for some in (source.train, source.held))
    assert not train & held
    assert sum(stop - start for start, stop in held) == pytest.approx(0.2 * file.num_tokens, abs=30)
    assert not source.warning
    assert "30 pairs are longer than seq_len 29 and left out" in PairRows(file, 29, 0, 0.0).warning
    with pytest.raises(DataError, match="no pair of at most 8 tokens"):
        PairRows(file, 8, 0, 0.0)
    talk = write("talk.jsonl", [{"messages": [user("a"), assistant("b")]}])
    with pytest.raises(DataError, match=r"talk\.jsonl: no pairs"):
        tokenize([tmp_path / "pairs.jsonl", talk], tmp_path / "mixed", options)
    with pytest.raises(DataError, match="line 2: a conversation, unlike the first row of the file, a pair"):
        tokenize([write("two.jsonl", [rows[0], {"messages": [user("a"), assistant("b")]}])], tmp_path / "m", options)
    with pytest.raises(DataError, match="line 2: chosen and rejected are equal answers"):
        tokenize([write("equal.jsonl", [rows[0], {**rows[0], "rejected": "fine "}])], tmp_path / "e", options)


def test_pairs_in_parquet(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tiny_tokenizer().save(tmp_path / "tokenizer")
    table = {key: [row[key] for row in PAIRS[1:2]] for key in ("prompt", "chosen", "rejected")}
    table["messages"] = [[*TALK, assistant("fine")]]  # as in published sets
    parquet.write_table(arrow.table(table), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text(json.dumps(PAIRS[0]) + "\n")
    both = [
        tokenize([tmp_path / f"a.{kind}"], tmp_path / kind, Options(str(tmp_path / "tokenizer")))
        for kind in ("parquet", "jsonl")
    ]
    assert both[0].paired
    assert both[0].ids_T.tolist() == both[1].ids_T.tolist()
