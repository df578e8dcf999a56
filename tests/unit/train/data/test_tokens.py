"""Token files: what is written is read; whatever is damaged is named when the file is opened."""

import errno
import json

import numpy as np
import pytest

from glm5.common.errors import DataError
from glm5.train.data import tokens
from glm5.train.data.tokens import TokenFile, writing

DOCUMENTS = [[1, 2, 3], [300], [7] * 10]


def write(path, documents=DOCUMENTS, vocab_size=320, **options):
    with writing(path, vocab_size, **options) as writer:
        for ids in documents:
            writer.add(ids)
    return path


@pytest.mark.parametrize(("vocab_size", "size"), [(320, 2), (1 << 16, 2), ((1 << 16) + 1, 4)])
def test_what_is_written_is_read(tmp_path, vocab_size, size):
    file = TokenFile(write(tmp_path / "a", vocab_size=vocab_size, about={"text": "x"}))
    assert file.ids_T.tolist() == [token for ids in DOCUMENTS for token in ids]
    assert file.ids_T.itemsize == size
    assert file.ends.tolist() == [3, 4, 14]
    assert (file.num_tokens, file.largest_id, file.about, file.marks_T) == (14, 300, {"text": "x"}, None)


@pytest.mark.parametrize("path", [".", "..", "/"])
def test_a_folder_without_a_name_is_refused(path):
    with pytest.raises(DataError, match=r"as the folder to write; .* give one by name"):
        write(path)


def test_pieces_end_where_documents_end(tmp_path):
    file = TokenFile(write(tmp_path / "a"))
    for start in range(14):
        for stop in range(start + 1, 15):
            pieces = file.lengths(start, stop)
            assert sum(pieces) == stop - start
            ends = set((start + np.cumsum(pieces)).tolist())
            assert ends == {stop} | {end for end in (3, 4, 14) if start < end < stop}


def test_marks_travel_with_the_tokens(tmp_path):
    with writing(tmp_path / "a", 320, marked=True) as writer:
        writer.add([1, 2], [False, True])
        writer.add([3])
    marks_T = TokenFile(tmp_path / "a").marks_T
    assert marks_T is not None
    assert marks_T.tolist() == [0, 1, 1]


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin"])
@pytest.mark.parametrize(("change", "says"), [(-1, "truncated"), (3, "too long")])
def test_a_file_of_the_wrong_size_is_named(tmp_path, name, change, says):
    file = write(tmp_path / "a") / name
    content = file.read_bytes()
    file.write_bytes(content[:change] if change < 0 else content + b"x" * change)
    with pytest.raises(DataError, match=rf"{name} is {says}"):
        TokenFile(tmp_path / "a")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("format", "x", "not the index"),
        ("version", 2, "version 2"),
        ("dtype", "int8", "dtype"),
        ("num_tokens", -1, "is -1"),
    ],
)
def test_a_damaged_index_is_named(tmp_path, key, value, says):
    file = write(tmp_path / "a") / "index.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(DataError, match=says):
        TokenFile(tmp_path / "a")


def test_a_folder_without_index_is_none(tmp_path):
    with pytest.raises(DataError, match="no token file"):
        TokenFile(tmp_path / "none")


def test_ids_without_a_row_are_refused_on_both_sides(tmp_path):
    with pytest.raises(DataError, match=r"0\.\.319, got 300\.\.320"):
        write(tmp_path / "a", [[300, 320]])
    with pytest.raises(DataError, match="ids 0 to 299"):
        TokenFile(write(tmp_path / "b")).check_vocabulary(300)
    assert not (tmp_path / "a").exists()


def test_nothing_changes_when_writing_fails(tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokens.os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device; what was there before is unchanged"):
        write(tmp_path / "a", [[5]])
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_never_lost(tmp_path):
    write(tmp_path / "tokens")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").touch()
    (tmp_path / "file").touch()
    for name in ("tokens", "folder", "file"):
        with pytest.raises(DataError, match=f"{name} is there already, .* move it away, or give another folder"):
            write(tmp_path / name, [[5]])
    assert TokenFile(tmp_path / "tokens").num_documents == len(DOCUMENTS)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty")


def test_no_tokens_at_all_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no tokens"):
        write(tmp_path / "a", [[], []])
