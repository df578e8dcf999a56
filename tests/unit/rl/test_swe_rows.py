"""Rows in the formats of published sets, written here."""

import json

import pytest

from glm5.common.errors import DataError
from glm5.rl.swe.rows import read_row

BENCH = {
    "repo": "a/b",
    "instance_id": "a__b-1",
    "base_commit": "0" * 40,
    "patch": "diff --git a/x b/x",
    "test_patch": "",
    "problem_statement": "It fails.",
    "FAIL_TO_PASS": '["tests/test_x.py::test_y"]',
    "PASS_TO_PASS": "[]",
}
REBENCH = BENCH | {
    "docker_image": "set/a__b-1",
    "FAIL_TO_PASS": ["t::a"],
    "install_config": {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest", "python": "3.9"},
}
SMITH = {key: value for key, value in BENCH.items() if key != "base_commit"} | {"image_name": "smith/a__b"}
R2E = {
    "repo_name": "a",
    "docker_image": "r2e/a:1",
    "commit_hash": "1" * 40,
    "problem_statement": "It fails.",
    "expected_output_json": '{"test_a": "PASSED", "test_b": "FAILED"}',
}


@pytest.mark.parametrize("row", [BENCH, REBENCH, SMITH, R2E])
def test_rows_of_each_set(row):
    found = read_row(json.dumps(row))
    assert found.problem == "It fails."
    assert len(found.must_pass) == 1


def test_what_the_sets_tell():
    assert read_row(json.dumps(REBENCH)).install.test_cmd == "pytest -rA"
    assert read_row(json.dumps(SMITH)).image == "smith/a__b"
    assert read_row(json.dumps(R2E)).must_pass == ("test_a",)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"FAIL_TO_PASS": "["}, "FAIL_TO_PASS"),
        ({"FAIL_TO_PASS": "[]"}, "no test must pass"),
        ({"PASS_TO_PASS": 3}, "PASS_TO_PASS"),
        ({"patch": None}, "patch"),
        ({"install_config": "x"}, "install_config"),
    ],
)
def test_rows_that_are_wrong(change, named):
    with pytest.raises(DataError, match=named):
        read_row(json.dumps(BENCH | change))


def test_no_row():
    with pytest.raises(DataError, match="no row"):
        read_row("[1]")
