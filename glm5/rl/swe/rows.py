"""Rows of published sets of software tasks, as one record. Their images must be had elsewhere: rows are only read.

SWE-bench      FAIL_TO_PASS and PASS_TO_PASS as JSON in text, base_commit, test_patch
SWE-smith      the same keys, an image for each repository
SWE-rebench    the same, docker_image, install_config with test_cmd and log_parser
R2E-Gym        docker_image, commit_hash, expected_output_json: the status of each test
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm5.common.errors import DataError

MAX_CHARS = 4_000_000
R2E = ("repo_name", "docker_image", "commit_hash", "problem_statement")
_PASSED = ("PASSED", "XFAIL")


@dataclass(frozen=True)
class Row:
    """A task. `image`: of Docker; `base`: a commit; `patch`: the solution; "" for what the set does not tell."""

    repo: str
    image: str
    base: str
    problem: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    test_command: str
    parser: str
    patch: str


def read_row(line: str) -> Row:
    """A row of any of the sets (JSON). Raises DataError, which names the key that is wrong."""
    try:
        row = json.loads(line) if len(line) <= MAX_CHARS else None
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise DataError(f"{line!r:.80}: no row; allowed: a JSON object of at most {MAX_CHARS} characters")
    if "expected_output_json" in row:
        statuses = _json(row, "expected_output_json", dict)
        passing = tuple(name for name, status in statuses.items() if status in _PASSED)
        repo, image, base, problem = (_text(row, key) for key in R2E)
        return _with_tests(Row(repo, image, base, problem, passing, (), "", "r2e", _text(row, "patch", "")))
    install = row.get("install_config") or {}
    if not isinstance(install, Mapping):
        raise DataError(f"install_config: got {install!r:.40}; allowed: an object")
    image = _text(row, "docker_image", _text(row, "image_name", ""))
    repo, base, problem = _text(row, "repo"), _text(row, "base_commit", ""), _text(row, "problem_statement")
    failing, passing = (tuple(map(str, _json(row, key, list))) for key in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    command, parser = _text(install, "test_cmd", ""), _text(install, "log_parser", "")
    return _with_tests(Row(repo, image, base, problem, failing, passing, command, parser, _text(row, "patch")))


def _with_tests(row: Row) -> Row:
    if not row.fail_to_pass:
        raise DataError(f"{row.repo}: no test must pass, so that nothing could be rewarded; leave the row out")
    return row


def _text(row: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = row.get(key, default)
    if not isinstance(value, str):
        raise DataError(f"{key}: got {value!r:.40}; allowed: text")
    return value


def _json(row: Mapping[str, Any], key: str, kind: type) -> Any:
    """A value, or a text that is JSON of it."""
    value = row.get(key)
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise DataError(f"{key}: got {row.get(key)!r:.40}; allowed: a {kind.__name__}, also as JSON in text")
    return value
