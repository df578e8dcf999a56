"""What each part found: what counts as its result, and what that came of."""

import json
from dataclasses import replace

import pytest

from glm5.bench.all.commands import BenchCommand, Size
from glm5.bench.all.work import Work
from glm5.common.errors import ConfigError

TINY = Size("eighth_tp1", "tiny", 1, 2)
LOAD = BenchCommand("serve-1", ("bench", "serve", "--seed", "1"), 1, clients=1, server=("--max-num-seqs", "1"))
STEPS = BenchCommand("steps", ("bench", "latency", "--preset", "tiny"), 1)


def measured(part, work, failed=0):
    work.begin(part)
    work.file(part).write_text(json.dumps({"runs": [{"failed": failed}], "partial": False}))


def test_a_part_is_done_when_it_can_be_read_and_all_its_requests_were_answered(tmp_path):
    work = Work(tmp_path, TINY, "abc")
    assert not work.is_done(LOAD)
    for failed, done in ((0, True), (3, False)):
        measured(LOAD, work, failed)
        assert work.is_done(LOAD) == done
    work.file(LOAD).write_text("{")
    with pytest.raises(ConfigError, match=r"serve-1\.json cannot be read as results"):
        work.is_done(LOAD)


@pytest.mark.parametrize(
    ("part", "size", "commit"),
    [
        (LOAD, TINY, "def"),
        (LOAD, TINY, None),
        (replace(LOAD, command=("bench", "serve", "--seed", "2")), TINY, "abc"),
        (replace(LOAD, server=("--max-num-seqs", "2")), TINY, "abc"),
        (LOAD, replace(TINY, preset="nano"), "abc"),
        (LOAD, replace(TINY, layers=1), "abc"),
    ],
)
def test_what_came_of_something_else_is_no_result(tmp_path, part, size, commit):
    before, work = Work(tmp_path, TINY, "abc"), Work(tmp_path, size, commit)
    measured(LOAD, before)
    assert before.is_done(LOAD)
    assert work.found(part) is None
    assert not work.is_done(part)
    work.begin(part)  # and is cut short before it finds anything
    assert not work.is_done(part)
    assert not before.is_done(LOAD)


def test_what_the_same_found_before_it_was_cut_short_stays(tmp_path):
    work = Work(tmp_path, TINY, None)
    measured(STEPS, work)
    work.begin(STEPS)
    assert Work(tmp_path, TINY, None).found(STEPS) is not None


def test_a_result_of_which_nothing_is_known_is_none(tmp_path):
    work = Work(tmp_path, TINY, "abc")
    work.file(STEPS).write_text("{}")
    assert not work.is_done(STEPS)
    work.begin(STEPS)
    assert [path.name for path in tmp_path.iterdir()] == ["steps.origin.json"]


def test_what_is_known_of_a_result_must_be_readable(tmp_path):
    work = Work(tmp_path, TINY, "abc")
    measured(STEPS, work)
    (tmp_path / "steps.origin.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"steps\.origin\.json holds no JSON object; mend it, or move it away"):
        work.found(STEPS)
