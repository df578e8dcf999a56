"""Files of every kind give the same documents, whoever wrote them; what is damaged, cut off or endless is one error.

tests/data/datasets was written by the library `datasets` 5.2.0, with two rows in `train`, the first of them in `test`:
DatasetDict.save_to_disk("saved", num_shards={"train": 2, "test": 1}), and of `train` to_parquet, to_json.
"""

import gzip
import json
import shutil
import tracemalloc
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from glm5.common.errors import DataError
from glm5.train.data import files
from glm5.train.data.files import batches_of, files_of
from glm5.train.data.tokenize import Options, tokenize
from tests.support.tokenizers import tiny_tokenizer

RECORDED = Path(__file__).parents[3] / "data" / "datasets"
ROWS = [{"text": text} for text in ("the weather", "is fine\n北京", "", 'a "quoted" \\ [{text}], and so on')]


@pytest.fixture(scope="module")
def arrow():
    return pytest.importorskip("pyarrow")


def documents(path):
    return [row["text"] for batch in batches_of(path, "text") for row in map(parsed, batch.documents)]


def parsed(document):
    return json.loads(document) if isinstance(document, bytes) else document


def zstd(arrow, path, content):
    with arrow.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(content)


def write_arrow(arrow, path, rows, *, stream=True):
    table = arrow.Table.from_pylist(rows)
    with (arrow.ipc.new_stream if stream else arrow.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def test_every_container_gives_the_same_documents(tmp_path, arrow):
    parquet = pytest.importorskip("pyarrow.parquet")
    lines = "".join(json.dumps(row) + "\n\n" for row in ROWS).encode()
    for name, content in {
        "a.jsonl": lines,
        "b.json": lines.rstrip(),
        "c.json": json.dumps(ROWS, ensure_ascii=False).encode(),
        "d.json": b"\xef\xbb\xbf \n" + json.dumps(ROWS, indent=4).encode() + b"\n",
    }.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content[:9]) + gzip.compress(content[9:]))
        zstd(arrow, tmp_path / f"{name}.zst", content)
    parquet.write_table(arrow.Table.from_pylist(ROWS), tmp_path / "e")
    write_arrow(arrow, tmp_path / "f", ROWS)
    write_arrow(arrow, tmp_path / "g.arrow", ROWS, stream=False)
    shutil.copy(tmp_path / "a.jsonl.gz", tmp_path / "h.jsonl")
    # As pzstd writes: a frame that is to be skipped, then two frames.
    frames = [b"\x50\x2a\x4d\x18\x04\0\0\0skip"]
    for piece in (lines[:20], lines[20:]):
        zstd(arrow, tmp_path / "frame", piece)
        frames.append((tmp_path / "frame").read_bytes())
    (tmp_path / "frame").unlink()
    (tmp_path / "i.jsonl.zst").write_bytes(b"".join(frames))
    found = {file.name: documents(file) for file in sorted(tmp_path.iterdir())}
    assert len(found) == 17
    assert all(one == [row["text"] for row in ROWS] for one in found.values()), found
    for file in tmp_path.iterdir():
        num_bytes = sum(batch.num_bytes for batch in batches_of(file, "text"))
        assert file.stat().st_size - 8 <= num_bytes <= file.stat().st_size  # Arrow's stream ends with 8 bytes


def test_a_text_may_be_packed(tmp_path, arrow):
    text = '[{"this": "is a text"}]'
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    zstd(arrow, tmp_path / "c.zst", text.encode())
    for file in tmp_path.iterdir():
        (batch,) = batches_of(file, "text")
        assert batch.documents == [text]


def test_an_array_is_read_in_pieces_of_any_size(tmp_path, monkeypatch):
    seed = 5
    print(f"{seed=}")
    random = Random(seed)
    rows = [{"text": "".join(random.choices('ab"\\{[,]} é北\n', k=random.randrange(60)))} for _ in range(200)]
    (tmp_path / "a.json").write_text(json.dumps(rows, ensure_ascii=False, indent=random.choice((None, 1))))
    for size in (1, 2, 3, 7, 50, 1000):
        monkeypatch.setattr(files, "_CHARACTERS", size)
        monkeypatch.setattr(files, "BATCH_BYTES", 500)
        assert documents(tmp_path / "a.json") == [row["text"] for row in rows]


@pytest.mark.parametrize("name", ["saved/train", "train-00000-of-00001.parquet", "rows.jsonl.gz", "rows.json", ""])
def test_what_datasets_writes_is_learnt_as_its_rows_say(tmp_path, name):
    pytest.importorskip("pyarrow")
    tiny_tokenizer().save(tmp_path / "tokenizer")
    folder = RECORDED / name
    if not name:  # a folder of Parquet files
        (folder := tmp_path / "parquet" / "deeper").mkdir(parents=True)
        shutil.copy(RECORDED / "train-00000-of-00001.parquet", folder)
        folder = tmp_path / "parquet"
    file = tokenize([folder], tmp_path / "out", Options(str(tmp_path / "tokenizer")))
    assert file.marks_T is not None
    found = []
    for start, stop in pairwise([0, *file.ends]):
        ids = zip(file.ids_T[start:stop].tolist(), file.marks_T[start:stop].tolist(), strict=True)
        found.append(tiny_tokenizer().decode([token_id for token_id, mark in ids if mark]))
    call = "<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call><|observation|>"
    assert found == ["is fine<|user|>", f"{call}rain<|user|>"]
    assert "Berlin" in tiny_tokenizer().decode(file.ids_T.tolist()), "with weight 0: context"


def test_folders_with_splits_are_for_the_user_to_choose_from(tmp_path):
    with pytest.raises(DataError, match=r"saved: holds several splits, .* one of .*saved/train, .*saved/test"):
        files_of(RECORDED / "saved")
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "_hidden"):
        (tmp_path / f"{name}.parquet").touch()
    with pytest.raises(DataError, match=r"holds files of test, train, .* name files, such as .*/train-\*\.parquet"):
        files_of(tmp_path)
    (tmp_path / "test-00000-of-00001.parquet").unlink()
    assert [file.name[:11] for file in files_of(tmp_path)] == ["train-00000", "train-00001"]
    shutil.copytree(RECORDED / "saved", tmp_path / "one")
    (tmp_path / "one" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert [file.parent.name for file in files_of(tmp_path / "one")] == ["train", "train"]


@pytest.mark.parametrize(
    "said",
    [
        *('{"splits": ["../x"]}', '{"splits": [5]}', '{"splits": []}', '{"splits": [""]}', '{"splits": [".."]}'),
        *('{"splits": ["' + "a" * 5000 + '"]}', "{", "[]", "[" * 5000),
    ],
)
def test_a_damaged_folder_of_datasets_is_named(tmp_path, said):
    (tmp_path / "dataset_dict.json").write_text(said)
    (tmp_path.parent / "x").mkdir(exist_ok=True)
    with pytest.raises(DataError, match=r"dataset_dict\.json (is damaged|names)"):
        files_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"[5]", "row 1: not a JSON object but '5]'; the rows of an array are objects"),
        ("a.json", b'[{"text": "a"}', "row 1: behind it is the end of the file; allowed: a comma"),
        ("a.json", b'[{"text": "a"} {', r"row 1: behind it is '\{'; allowed: a comma"),
        ("a.json", b'[{"text": "a"},]', r"row 2: not a JSON object but '\]'"),
        ("a.json", b'[{"text": "a"}]5', "behind the array is '5'; allowed: one array"),
        ("a.json", b'[] [{"text": "a"}]', r"behind the array is '\[\{"),
        ("a.json", b'[{"text": "a"}, {"text": "b', "row 2: not a JSON object: Unterminated string"),
        ("a.json", b'[{"text": "a"}, {"text": b}' + b" " * 99, "row 2: not a JSON object: Expecting value"),
        ("a.json", b'[{"text": "a"}, {"text": ' + b"[" * 99_999, "row 2: not a JSON object: .*recursion"),
        ("a.json", b'[{"n": ' + b"1" * 9999 + b"}]", "row 1: not a JSON object: Exceeds the limit"),
        ("a.json", b'[{"text": "\xff"}]', r"a\.json: not UTF-8"),
        ("a.json", b'{\n  "text": "a"\n}', "line 1: not a JSON object"),
        ("a.jsonl", b'{"text": ' + b"[" * 99_999, "line 1: not a JSON object: .*recursion"),
        ("a.jsonl", b'{"text": "' + b"a" * 3000, "line 1: longer than 0 MiB, the most that a row may have"),
        ("a.json", b'[{"text": "' + b"a" * 3000, "row 1: longer than 0 MiB, the most that a row may have"),
        ("a.jsonl", b"\n" * 600, "line 501: behind 0 MiB of empty lines"),
        ("a.txt", b"a" * 5000, "more than 0 MiB in one text; split it"),
        ("a.txt.gz", gzip.compress(b"\0" * 300_000), "unpacks to more than 0 MiB and 100 times its size"),
        ("a.jsonl.gz", gzip.compress(b"{}\n" * 100_000), "unpacks to more than 0 MiB and 100 times its size"),
        ("a.gz", gzip.compress(bytes(range(256)) * 4)[:-9], "cannot be unpacked .*copy it anew"),
        ("a.gz", b"\x1f\x8b and no more", "cannot be unpacked .*copy it anew"),
        ("a.zst", b"\x28\xb5\x2f\xfd and no more", "cannot be unpacked .*copy it anew"),
        ("a.arrow", b"\xff\xff\xff\xff and no more", "cannot be read as a table"),
        ("a", b"ARROW1 and no more", "cannot be read as a table"),
        ("a.arrow", b"text", "cannot be read as Arrow: it begins as none does"),
    ],
)
def test_bad_content_is_one_error(tmp_path, monkeypatch, arrow, name, content, says):
    for limit, size in (("ROW", 2000), ("TEXT", 4000), ("BLANK", 500), ("UNPACKED", 100_000), ("_CHARACTERS", 1000)):
        monkeypatch.setattr(files, limit, size)
    if "recursion" in says or "Exceeds" in says:
        monkeypatch.setattr(files, "ROW", 1_000_000)
    tiny_tokenizer().save(tmp_path / "tokenizer")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        tokenize([tmp_path / name], tmp_path / "out", Options(str(tmp_path / "tokenizer")))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_long_row_of_a_table_is_named(tmp_path, monkeypatch, arrow):
    monkeypatch.setattr(files, "ROW", 2000)
    write_arrow(arrow, tmp_path / "a", [*ROWS, {"text": "a" * 3000}])
    with pytest.raises(DataError, match="a, row 5: longer than"):
        documents(tmp_path / "a")


def test_long_rows_of_a_table_become_python_objects_one_by_one(tmp_path, monkeypatch, arrow):
    monkeypatch.setattr(files, "ROW", 2000)
    write_arrow(arrow, tmp_path / "a", [{"text": letter * 1500} for letter in "abc"])
    found = list(batches_of(tmp_path / "a", "text"))
    assert [len(batch.documents) for batch in found] == [1, 1, 1]
    assert [batch.documents[0]["text"][0] + batch.places[0][-1] for batch in found] == ["a1", "b2", "c3"]


@pytest.mark.parametrize("stored", ["not UTF-8", "timestamp", "date", "bytes", "two columns"])
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_columns_that_are_no_texts_are_one_error(tmp_path, arrow, ending, stored):
    wrong = arrow.array([b"\xff"]).view(arrow.string())
    column, says = {
        "not UTF-8": (wrong, "cannot be read as a table: .*(UTF8|utf-8)"),
        "timestamp": (arrow.array([1], arrow.timestamp("ns")), "as a table: Nano|text: got"),  # with pandas: the latter
        "date": (arrow.array([1], arrow.date32()), r"row 1: text: got .*allowed: a text"),
        "bytes": (arrow.array([b"a"]), r"row 1: text: got .*allowed: a text"),
        "two columns": (arrow.array(["a"]), "has 2 columns 'text'; allowed: one"),
    }[stored]
    table = arrow.table([column] * (1 + (stored == "two columns")), ["text"] * (1 + (stored == "two columns")))
    if ending == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, tmp_path / "a.parquet")
    else:
        with arrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
    tiny_tokenizer().save(tmp_path / "tokenizer")
    with pytest.raises(DataError, match=says):
        tokenize([tmp_path / f"a.{ending}"], tmp_path / "out", Options(str(tmp_path / "tokenizer")))


@pytest.mark.parametrize("at", range(0, 800, 50))
def test_a_flipped_byte_of_a_table_is_an_error_or_another_text(tmp_path, arrow, at):
    write_arrow(arrow, tmp_path / "a.arrow", ROWS * 2)
    content = bytearray((tmp_path / "a.arrow").read_bytes())
    content[at] ^= 0xFF
    (tmp_path / "a.arrow").write_bytes(content)
    try:
        assert len(documents(tmp_path / "a.arrow")) <= 8
    except (DataError, KeyError) as error:
        print(f"{error!r:.100}")


def test_nesting_that_python_reads_but_cannot_render_is_an_error_of_the_data(tmp_path):
    tiny_tokenizer().save(tmp_path / "tokenizer")
    for depth in (100, 400, 700, 900, 970):
        arguments = "[" * depth + "]" * depth
        call = f'{{"function": {{"name": "f", "arguments": {{"x": {arguments}}}}}}}'
        row = f'{{"messages": [{{"role": "user", "content": "a"}}, {{"role": "assistant", "tool_calls": [{call}]}}]}}'
        (tmp_path / "a.jsonl").write_text(row)
        with suppress(DataError) if depth > 100 else nullcontext():
            tokenize([tmp_path / "a.jsonl"], tmp_path / f"out{depth}", Options(str(tmp_path / "tokenizer")))


def test_large_files_are_streams(tmp_path, arrow):
    """What is in memory at once is a small part of the file."""
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"text": f"{i} " + "the weather is fine " * 100} for i in range(4000)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode(), 1))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=500)
    write_arrow(arrow, tmp_path / "d.arrow", rows)
    size = (tmp_path / "a.json").stat().st_size
    assert size > 8_000_000
    for file in sorted(tmp_path.iterdir()):
        held = arrow.total_allocated_bytes()
        tracemalloc.start()
        try:
            counted = [(len(batch.documents), arrow.total_allocated_bytes()) for batch in batches_of(file, "text")]
            peak = tracemalloc.get_traced_memory()[1] + max(allocated for _, allocated in counted) - held
        finally:
            tracemalloc.stop()
        print(f"{file.name}: {peak:,} of {size:,} bytes")
        assert sum(number for number, _ in counted) == len(rows)
        assert peak < size / 2
