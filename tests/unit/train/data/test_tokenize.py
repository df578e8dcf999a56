"""Tokenization: the same ids from every format and any number of processes; bad input is named by file and line."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest

from glm5.common.errors import DataError
from glm5.train.data import files as module
from glm5.train.data.tokenize import Options, tokenize
from tests.support.conversations import assistant, user
from tests.support.tokenizers import tiny_tokenizer

TEXTS = ["the weather in Paris", "is fine 北京", "", "and a <|user|> that is no turn"]


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save(path)
    return Options(str(path))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def documents_of(file):
    return [file.ids_T[start:stop].tolist() for start, stop in pairwise([0, *file.ends])]


def expected():
    end = tiny_tokenizer().id_of("<|endoftext|>")
    return [[*tiny_tokenizer().encode(text, allow_special=False), end] for text in TEXTS]


def test_every_format_gives_the_same_ids(tmp_path, options):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    jsonl = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    parquet.write_table(arrow.table({"text": TEXTS, "other": [1, 2, 3, 4]}), tmp_path / "a.parquet")
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    inputs = [[jsonl], [tmp_path / "a.parquet"], [tmp_path / f"{i}.txt" for i in range(4)]]
    for i, files in enumerate(inputs):
        assert documents_of(tokenize(files, tmp_path / f"out{i}", options)) == expected()


def test_a_column_of_another_name_is_read(tmp_path, options):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"body": TEXTS}), tmp_path / "a.parquet")
    file = tokenize([tmp_path / "a.parquet"], tmp_path / "out", replace(options, text_key="body"))
    assert documents_of(file) == expected()


def test_processes_do_not_change_the_order(tmp_path, options, monkeypatch):
    monkeypatch.setattr(module, "BATCH_BYTES", 40)
    file = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i} {text}"} for i in range(30) for text in TEXTS])
    alone = tokenize([file], tmp_path / "one", options)
    together = tokenize([file], tmp_path / "two", options, processes=2)
    assert documents_of(alone) == documents_of(together)
    assert alone.num_documents == 120
    assert str(tmp_path) not in json.dumps(alone.about), "a token file can be moved"


def test_conversations_are_marked(tmp_path, options):
    talk = {"messages": [user("a"), assistant("b")], "thinking": "off"}
    ids = {"token_ids": [1, 2], "loss_mask": [0, 1]}
    file = tokenize([write_jsonl(tmp_path / "a.jsonl", [talk, ids])], tmp_path / "out", options)
    assert file.marks_T is not None
    assert file.marks_T.tolist()[-2:] == [0, 1]
    assert 0 < file.marks_T.sum() < file.num_tokens


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not a JSON object"),
        ("[1]", "line 2: not a JSON object but list"),
        ('{"body": "x"}', "line 2: no text under 'text'; there is body"),
        ("{}", "line 2: no text under 'text'; there is nothing; --text-key"),
        ('{"text": 5}', "line 2: text: got 5; allowed: a text, in quotes"),
        ('{"text": null}', "line 2: text: got null; allowed: a text, in quotes"),
        ('{"text": "\\ud800"}', "line 2: .*unpaired surrogate"),
        ('{"messages": []}', "line 2: messages must be"),
        ("\xff", "line 2: not a JSON object"),
        ('{"token_ids": [1, 99999], "loss_mask": [0, 1]}', "line 2: token id 99999: the tokenizer has 0 to"),
        ('{"token_ids": [1, 2], "loss_mask": [0, 1]}', "line 2: a conversation, unlike the first row .* a file each"),
    ],
)
def test_bad_lines_are_named(tmp_path, options, line, says):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "good"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(DataError, match=says):
        tokenize([file], tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_a_text_among_conversations_is_named(tmp_path, options):
    rows = [{"token_ids": [1, 2], "loss_mask": [0, 1]}, {"text": "not said by anybody"}]
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: a text, unlike the first row .* a file each"):
        tokenize([write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("order", [1, -1])
def test_files_of_texts_beside_files_of_conversations_are_learnt_whole(tmp_path, options, order):
    talks = write_jsonl(tmp_path / "a.jsonl", [{"token_ids": [1, 2], "loss_mask": [0, 1]}])
    texts = write_jsonl(tmp_path / "b.jsonl", [{"text": TEXTS[0]}])
    file = tokenize([talks, texts][::order], tmp_path / "out", options)
    marks = [[0, 1], [1] * len(expected()[0])][::order]
    assert file.marks_T is not None
    assert file.marks_T.tolist() == [*marks[0], *marks[1]]


def test_rows_without_anything_to_learn_are_told(tmp_path, options, caplog):
    rows = [{"token_ids": [1, 2], "loss_mask": [0, mark]} for mark in (1, 0, 1, 0)]
    file = tokenize([write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out", options)
    assert file.num_documents == 2
    assert "2 rows in which nothing is to be learnt, the first at" in caplog.text
    assert "a.jsonl, line 2" in caplog.text


def test_errors_come_from_other_processes(tmp_path, options):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{\n')
    with pytest.raises(DataError, match="line 2: not a JSON object"):
        tokenize([tmp_path / "a.jsonl"], tmp_path / "out", options, processes=2)
    assert not (tmp_path / "out").exists()


def test_bad_files_are_named(tmp_path, options):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    (tmp_path / "a.parquet").write_bytes(b"no")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"a\.txt: not UTF-8 text: .* at byte 2"):
        tokenize([tmp_path / "a.txt"], tmp_path / "out", options)
    with pytest.raises(DataError, match="no such file"):
        tokenize([tmp_path / "b.txt"], tmp_path / "out", options)
    with pytest.raises(DataError, match=r"is a folder without .*; name files, such as .*/\*\.jsonl"):
        tokenize([tmp_path / "empty"], tmp_path / "out", options)
    with pytest.raises(DataError, match="no files"):
        tokenize([], tmp_path / "out", options)
    pytest.importorskip("pyarrow")
    for name in ("a", "b"):
        with pytest.raises(DataError, match=rf"{name}\.parquet: cannot be read as (a table|Parquet)"):
            tokenize([tmp_path / f"{name}.parquet"], tmp_path / "out", options)
