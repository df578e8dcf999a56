"""Sources: an epoch has every token once, held-out tokens in none, and no row depends on those before."""

import re
from collections import Counter

import numpy as np
import pytest

from glm5.chat.template import ChatTemplate
from glm5.common.errors import DataError
from glm5.train.data.dialogues import train_tokenizer
from glm5.train.data.sources import ChunkedRows, DialogueRows, MixedRows, NeedleRows, PackedRows, RulerRows
from glm5.train.data.tokens import TokenFile, writing
from tests.support.tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """1000 different tokens in documents of 1 to 19; odd ids are marked."""
    path = tmp_path_factory.mktemp("tokens") / "numbers"
    with writing(path, 1000, marked=True) as writer:
        at = 0
        while at < 1000:
            stop = min(1000, at + at * 7 % 19 + 1)
            writer.add(range(at, stop), [i % 2 == 1 for i in range(at, stop)])
            at = stop
    return TokenFile(path)


def held_tokens(source) -> set[int]:
    """Of a file of different tokens."""
    return {int(token) for i in range(1000 // 32 + 1) for token in source.row(i, "held out").ids}


@pytest.mark.parametrize("kind", [ChunkedRows, PackedRows])
def test_an_epoch_has_every_token_at_most_once(file, kind):
    source = kind(file, 32, seed=1, held_out=0.1)
    held = held_tokens(source)
    epochs = [[source.row(epoch * source.size + i, "train") for i in range(source.size)] for epoch in range(2)]
    for rows in epochs:
        seen = Counter(int(token) for row in rows for token in row.ids)
        assert set(seen.values()) == {1}
        assert not held & set(seen)
        assert 1000 - len(held) - 64 < len(seen)
        assert kind is ChunkedRows or len(seen) + len(held) == 1000
    assert [row.ids.tolist() for row in epochs[0]] != [row.ids.tolist() for row in epochs[1]]


@pytest.mark.parametrize("kind", [ChunkedRows, PackedRows])
def test_rows_end_where_documents_end_and_keep_their_marks(file, kind):
    source = kind(file, 32, seed=1, held_out=0.1)
    for split in ("train", "held out"):
        row = source.row(3, split)
        assert sum(row.lengths) == len(row.ids) == len(row.weights) <= 32
        assert row.weights.tolist() == [token % 2 for token in row.ids.tolist()]
        ends = set(file.ends.tolist())
        for last in np.cumsum(row.lengths)[:-1] - 1:
            assert int(row.ids[last]) + 1 in ends
        assert (set(row.ids.tolist()) <= held_tokens(source)) == (split == "held out")
        assert source.row(3, split).ids.tolist() == row.ids.tolist()


@pytest.mark.parametrize("shares", [(0.96, 0.02, 0.02), (0.02, 0.02, 0.96)])
def test_every_part_of_a_file_is_held_out_and_trained(tmp_path, shares):
    """A small file at the end of a list of files was held out as a whole, so that no model learnt it."""
    with writing(tmp_path / "parts", 3) as writer:
        for part, share in enumerate(shares):
            for _ in range(round(10_000 * share)):
                writer.add([part] * 10)
    source = PackedRows(TokenFile(tmp_path / "parts"), 100, seed=0, held_out=0.02)
    for rows, of in ((source.train, 0.98), (source.held, 0.02)):
        found = Counter(int(token) for i in range(len(rows)) for token in source._row(rows[i]).ids)
        assert sum(found.values()) == 100_000 * of
        for part, share in enumerate(shares):
            expected = 10_000 * share * of  # documents, drawn without replacement: at most binomial
            assert abs(found[part] / 10 - expected) < 5 * expected**0.5


def test_one_document_alone_is_cut_for_the_held_out_part(tmp_path):
    with writing(tmp_path / "one", 1000) as writer:
        writer.add(range(1000))
    for kind in (ChunkedRows, PackedRows):
        source = kind(TokenFile(tmp_path / "one"), 32, seed=0, held_out=0.1)
        assert min(source.row(0, "held out").ids) >= 900
        assert max(max(source.row(i, "train").ids) for i in range(source.size)) < 900


@pytest.mark.parametrize("small", [0, 3])
def test_a_small_document_among_large_ones_is_not_all_that_is_held_out(tmp_path, small):
    with writing(tmp_path / "large", 10) as writer:
        for number, length in enumerate((small, 500, 500, 500)):
            writer.add([number] * length)
    source = PackedRows(TokenFile(tmp_path / "large"), 32, seed=0, held_out=0.1)
    assert sum(len(source._row(source.held[i]).ids) for i in range(len(source.held))) == 500
    assert set(source.row(0, "held out").ids) == {3}


def test_too_few_tokens_are_an_error(file):
    with pytest.raises(DataError, match="fewer than two of seq_len 2000"):
        ChunkedRows(file, 2000, seed=0, held_out=0.1)
    with pytest.raises(DataError, match="too little is held out"):
        ChunkedRows(file, 32, seed=0, held_out=0.0).row(0, "held out")


def test_an_id_that_the_index_does_not_know_is_named_where_it_is_read(tmp_path):
    with writing(tmp_path / "one", 1000) as writer:
        writer.add([1, 2, 3, 4] * 50)
    tokens = tmp_path / "one" / "tokens.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:200] + b"\xff\xff" + content[202:])
    source = ChunkedRows(TokenFile(tmp_path / "one"), 8, seed=0, held_out=0.0)
    with pytest.raises(DataError, match=r"tokens\.bin is damaged: it holds id 65535 in tokens .* 4 at most"):
        for index in range(source.size):
            source.row(index, "train")


@pytest.mark.parametrize("learn", ["answer", "all"])
def test_tasks_are_rows_of_their_length(learn):
    tokenizer = tiny_tokenizer()
    source = RulerRows(["niah_single_1", "qa_1"], tokenizer, 700, seed=0, min_len=400, learn=learn)
    for index in range(4):
        row = source.row(index, "train")
        assert 300 < len(row.ids) <= 700
        answer = tokenizer.decode(row.ids[row.weights > 0].tolist(), skip_special=True)
        assert answer.strip()
        if learn == "answer":
            assert row.weights[-1] == 1
            assert 0 < row.weights.sum() < 60
    assert source.row(0, "train").ids.tolist() != source.row(0, "held out").ids.tolist()
    with pytest.raises(DataError, match="tasks: got 'x'"):
        RulerRows(["x"], tokenizer, 700, seed=0)


def test_a_length_that_a_task_does_not_fit_is_said_before_training():
    tokenizer = tiny_tokenizer()
    with pytest.raises(DataError, match=r"task niah_single_1 needs (\d+) tokens, .* as few as 60; set min_len") as said:
        RulerRows(["niah_single_1"], tokenizer, 700, seed=0, min_len=60)
    least = int(re.findall(r"needs (\d+)", str(said.value))[0])
    source = RulerRows(["niah_single_1"], tokenizer, least, seed=0)
    assert len(source.row(0, "train").ids) <= least


def test_needles_need_room_and_rows():
    assert len(NeedleRows(64, 320, seed=0).row(0, "train").ids) == 64
    with pytest.raises(DataError, match="vocabulary of 208"):
        NeedleRows(64, 200, seed=0)
    with pytest.raises(DataError, match="at least 48"):
        NeedleRows(40, 320, seed=0)


def test_a_mixture_draws_from_its_sources(file):
    fitted = PackedRows(file, 32, 0, 0.1)
    mixed = MixedRows([fitted, NeedleRows(64, 320, 0)], [1, 3], seed=0)
    names = Counter(mixed.where(draw).split()[0] for draw in range(1024))
    assert names == {"numbers": 256, "needle": 768}
    draw = next(draw for draw in range(99) if mixed.where(draw).startswith("numbers"))
    assert mixed.row(draw).ids.tolist() == fitted.row(0, "train").ids.tolist()


def test_held_out_rows_come_from_sources_that_hold_some_out(file):
    mixed = MixedRows([PackedRows(file, 32, 0, 0.0), NeedleRows(64, 320, 0)], [3, 1], seed=0)
    assert all(len(mixed.row(draw, "held out").ids) == 64 for draw in range(8))
    assert not MixedRows([PackedRows(file, 32, 0, 0.0)], [1], seed=0).holds_out


def test_conversations_have_the_asked_turns_and_lengths():
    template = ChatTemplate.bundled("glm-5.2", train_tokenizer(768))
    user = template.tokenizer.id_of("<|user|>")
    rows = DialogueRows(["recall", "copy"], template, 400, 0, turns={"recall": 3}, max_words=10)
    row = rows.row(0, "train")
    starts = np.cumsum([0, *row.lengths[:-1]])
    counts = [int((row.ids[a : a + n] == user).sum()) - 1 for a, n in zip(starts, row.lengths, strict=True)]
    assert set(counts[::2]) == {3}
    assert set(counts[1::2]) <= {1, 2, 5}
    assert max(row.lengths[::2]) < 10 + 3 * 30
    with pytest.raises(DataError, match=r"turns: got 'recal'; allowed: copy, sort"):
        DialogueRows([], template, 400, 0, turns={"recal": 3})
