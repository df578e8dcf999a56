"""Results by arm and seed, and the verdict on a claim."""

import json
import math

import pytest

from glm5.bench.claims.results import Results, decided, interval
from glm5.common.errors import DataError
from glm5.config.report import ClaimSection


def claim(**bounds) -> ClaimSection:
    given = {"name": "c", "stage": "s", "report": "r", "run": "run", "left": ("a", "x"), "right": ("b", "x")}
    return ClaimSection.model_validate(given | bounds)


def test_the_interval_is_students():
    # mean 2, deviation 1: 4.303 / sqrt 3
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / math.sqrt(3))
    assert interval([1.0, 2.0, 3.0]) != pytest.approx(1.96 / math.sqrt(3), rel=0.1)
    assert interval([5.0]) == 0.0


@pytest.mark.parametrize(
    ("mean", "half", "low", "high", "verdict"),
    [
        (1.0, 0.5, 0.0, None, "held"),
        (0.4, 0.5, 0.0, None, "not decided"),
        (-1.0, 0.5, 0.0, None, "not held"),
        (0.0, 0.1, -0.1, 0.1, "held"),
        (0.05, 0.1, -0.1, 0.1, "not decided"),
        (0.3, 0.1, -0.1, 0.1, "not held"),
        (0.0, 0.0, None, 0.0, "held"),
    ],
)
def test_the_verdict(mean, half, low, high, verdict):
    assert decided(mean, half, low, high) == verdict


def test_seeds_are_paired_and_kept(tmp_path):
    results = Results(tmp_path, "run")
    for seed, (left, right) in enumerate([(1.0, 0.5), (2.0, 1.0), (3.0, 2.5)]):
        results.add("a", ["k=1"], seed, {"x": left})
        results.add("b", [], seed, {"x": right})
    results.add("a", ["k=1"], 3, {"x": 100.0})  # no partner
    found = Results(tmp_path, "run").outcome(claim(low=0.0))
    assert found is not None
    assert (found.seeds, found.left, found.right) == (["0", "1", "2"], [1.0, 2.0, 3.0], [0.5, 1.0, 2.5])
    assert found.mean == pytest.approx(2 / 3)
    assert found.verdict == "not decided"
    assert Results(tmp_path, "run").outcome(claim(left=("c", "x"), low=0.0)) is None


def test_other_settings_are_another_arm(tmp_path):
    results = Results(tmp_path, "run")
    results.add("a", ["k=1"], 0, {"x": 1.0})
    assert not results.seeds("a", ["k=2"])
    results.add("a", ["k=2"], 1, {"x": 2.0})
    assert list(results.seeds("a", ["k=2"])) == ["1"]


ELEVEN = json.dumps({"arms": {"a": {"settings": [], "seeds": {str(i): {"x": i} for i in range(11)}}}})


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "[" * 100_000, '{"arms": {"a": 1}}', '{"arms": {}, "note": 5}', '{"arms": {}, "num_seeds": "x"}'),
        '{"arms": {"a": {"settings": [], "seeds": {"0": {"x": NaN}}}}}',
        '{"arms": {"a": {"settings": [], "seeds": {"0": {"x": 1%s}}}}}' % ("0" * 400),
        '{"arms": {"a": {"seeds": {"0": {"x": 1}}}}}',
        pytest.param(ELEVEN, id="more seeds than the interval knows"),
    ],
)
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(DataError, match=r"run.json: not results"):
        Results(tmp_path, "run")


def test_a_file_is_json(tmp_path):
    Results(tmp_path, "run").add("a", [], 0, {"x": 1.0})
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["arms"] == {"a": {"settings": [], "seeds": {"0": {"x": 1.0}}}}
    assert {"processor", "torch", "glm5", "python", "date"} <= set(found)
