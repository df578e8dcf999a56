"""Rollouts on disk: read back exactly, in bounded space, and refused where a file is not as it was written."""

import json
import os
import zlib
from contextlib import suppress
from random import Random

import pytest
import torch

from glm5.common.errors import DataError
from glm5.rl.records import store
from glm5.rl.records.digest import digests
from glm5.rl.records.store import Records, RecordWriter, read_groups, spans
from glm5.rl.rollout import Group, Rollout
from tests.support.rl_run import random_rollout, task_of

SEED = 26


def groups_of(random: Random, *, with_records: bool = True) -> list[Group]:
    tasks = [task_of(seed) for seed in range(3)]
    groups = [
        Group(
            7 + number,
            task,
            [random_rollout(random, task, with_records=with_records) for _ in range(random.randint(1, 3))],
        )
        for number, task in enumerate(tasks)
    ]
    failed = Rollout(tasks[0], 5, failure="sandbox", failure_reason="it died", seconds=1.5)
    return [*groups, Group(10, tasks[0], [failed, Rollout(tasks[0], 6, is_truncated=True)])]


def write(folder, step: int, groups: list[Group], max_bytes: float = 2**30) -> RecordWriter:
    writer = RecordWriter(folder, max_bytes, 1)
    empty = [[[None] * len(one.tree.segments) for one in group.rollouts] for group in groups]
    writer.write(step, 9, {"w": "ab"}, groups, empty)
    return writer


def plain(groups: list[Group]) -> list:
    """Groups as values that can be compared: arrays as lists with their types."""

    def of_segment(segment):
        experts = None if segment.experts is None else (segment.experts.dtype, segment.experts.tolist())
        return {**vars(segment), "experts": experts}

    def of_rollout(one):
        return {**vars(one), "task": vars(one.task), "tree": [of_segment(segment) for segment in one.tree.segments]}

    return [(group.number, vars(group.task), [of_rollout(one) for one in group.rollouts]) for group in groups]


def test_rollouts_are_read_back_exactly(tmp_path):
    groups = groups_of(Random(SEED))
    write(tmp_path, 12, groups)
    found = read_groups(Records(tmp_path), 12)
    for one in (*groups, *found):
        assert one.task.key  # a cached property: now all have it
        for rollout in one.rollouts:
            assert rollout.task.key
    assert plain(found) == plain(groups)
    assert Records(tmp_path).steps() == [12]
    head = Records(tmp_path).head(12)
    assert (head.step, head.steps, head.weights) == (12, 9, {"w": "ab"})
    assert head.groups[3].rewards == [None, 0.0]


def test_a_metric_may_be_no_number(tmp_path):
    rollout = Rollout(task_of(1), 1, metrics={"a": float("nan"), "b": float("inf"), "c": 1.0})
    write(tmp_path, 1, [Group(0, rollout.task, [rollout])])
    found = read_groups(Records(tmp_path), 1)[0].rollouts[0].metrics
    assert [str(value) for value in found.values()] == ["nan", "inf", "1.0"]


def test_a_group_is_read_without_the_others(tmp_path):
    groups = groups_of(Random(SEED))
    write(tmp_path, 1, groups)
    for index, group in enumerate(groups):
        traces = Records(tmp_path).group(1, index)
        assert [one.info.seed for one in traces] == [one.seed for one in group.rollouts]
    with pytest.raises(IndexError):
        Records(tmp_path).group(1, len(groups))


def test_a_file_is_lines_of_json_in_gzip(tmp_path):
    write(tmp_path, 1, groups_of(Random(SEED)))
    packed, text = Records(tmp_path).path(1).read_bytes(), b""
    while packed:
        unpacker = zlib.decompressobj(wbits=31)
        text += unpacker.decompress(packed)
        packed = unpacker.unused_data
    head, *traces = [json.loads(line) for line in text.splitlines()]
    assert head["step"] == 1
    assert {tuple(node)[:2] for trace in traces for node in trace["nodes"]} == {("token_ids", "mask")}
    assert sum(map(sum, (node["mask"] for trace in traces for node in trace["nodes"]))) == sum(
        len(node["logprobs"]) for trace in traces for node in trace["nodes"] if node.get("sampled")
    )


def test_the_oldest_are_deleted_first(tmp_path):
    groups = groups_of(Random(SEED))
    write(tmp_path, 1, groups)
    size = Records(tmp_path).path(1).stat().st_size
    for step in range(2, 8):
        write(tmp_path, step, groups, max_bytes=2 * 3.5 * size)
    assert Records(tmp_path).steps() == [5, 6, 7]
    write(tmp_path, 8, groups, max_bytes=size)
    assert Records(tmp_path).steps() == [5, 6, 7], "a step that has no room at all is not kept"
    state = tmp_path / "state.pt"
    for step in range(4):
        state.unlink(missing_ok=True)
        state.write_bytes(b"x" * 1000 + bytes([step]))
        RecordWriter(tmp_path, 2 * 2500, 1).keep_state(state, step)
    assert {number: path.read_bytes()[-1] for number, path in Records(tmp_path).states().items()} == {2: 2, 3: 3}
    RecordWriter(tmp_path, 1500, 1).keep_state(state, 9)
    RecordWriter(tmp_path, 2**30, 0).keep_state(state, 9)
    assert 9 not in Records(tmp_path).states()


def test_damaged_files_are_refused(tmp_path, monkeypatch):
    print("seed", SEED)
    random = Random(SEED)
    write(tmp_path, 1, groups_of(random))
    records = Records(tmp_path)
    whole = records.path(1).read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(random.randint(1, 3)):
            damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        records.path(1).write_bytes(damaged[: random.choice([len(damaged), random.randrange(len(damaged))])])
        with suppress(DataError):  # a checksum may be what was changed, or a time stamp
            read_groups(records, 1)
    records.path(1).write_bytes(whole)
    monkeypatch.setattr(store, "MAX_HEAD", 100)
    with pytest.raises(DataError, match="more than 100 bytes"):
        records.head(1)


@pytest.mark.parametrize(
    "change",
    [
        lambda trace: trace["nodes"][1].update(logprobs=[-1.0]),
        lambda trace: trace["nodes"][1].update(parent=7),
        lambda trace: trace["nodes"][1].update(token_ids=["a"]),
        lambda trace: trace["nodes"][1].update(token_ids=[2**40]),
        lambda trace: trace["nodes"][1]["routed_experts"].update(shape=[2**31 - 1, 2**31 - 1, 2**31 - 1]),
        lambda trace: trace["nodes"][1]["routed_experts"].update(shape=[1] * 40),
        lambda trace: trace["nodes"][1]["sampling_mask"]["counts"].update(data="////fw=="),
        lambda trace: trace.update(errors=[{"type": "nonsense", "message": ""}]),
        lambda trace: trace.update(info=[]),
        lambda trace: trace.clear(),
    ],
)
def test_hostile_rollouts_are_refused(tmp_path, change):
    groups = groups_of(Random(1))
    write(tmp_path, 1, groups)
    records = Records(tmp_path)
    head = records.head(1)
    trace = json.loads(store.as_json(records.group(1, 0)[0]))
    change(trace)
    members = [store.as_json(head), json.dumps(trace).encode()]
    records.path(1).write_bytes(b"".join(store._compress([one]) for one in members))
    with pytest.raises(DataError):
        read_groups(records, 1)


def test_what_is_no_file_is_refused(tmp_path):
    records = Records(tmp_path)
    with pytest.raises(DataError, match="kept are steps none"):
        records.head(3)
    records.folder.mkdir()
    os.mkfifo(records.path(3))
    with pytest.raises(DataError, match="not a regular file"):
        records.head(3)


def test_numbers_are_told_in_few_words():
    assert spans([1, 2, 3, 5, 8, 9]) == "1 to 3, 5, 8 to 9"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.float8_e4m3fn])
def test_any_changed_bit_changes_the_sum(dtype):
    weight = torch.arange(1, 40).reshape(3, 13).to(dtype)
    before = digests({"w": weight})["w"]
    assert digests({"w": weight.clone()})["w"] == before
    assert digests({"w": weight.t().contiguous()})["w"] != before, "the order counts"
    for number in (0, 17, 38):
        changed = weight.clone()
        changed.view(-1).view(torch.uint8)[number * weight.element_size()] ^= 1
        assert digests({"w": changed})["w"] != before
    assert len(digests({"w": torch.zeros(())})["w"]) == 16
