"""The registry, its page, and rows by command."""

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from glm5.bench.claims.measures import MEASURES
from glm5.bench.claims.page import page
from glm5.bench.claims.results import Results
from glm5.bench.claims.rows import missing, registry
from glm5.cli.main import main, parse
from glm5.config.rl import read_rl_recipe
from glm5.config.train import read_recipe

REPO = Path(__file__).parents[4]
KEPT = REPO / "docs" / "performance" / "report"
REGISTRY = registry()
NAMES = [one.name for one in REGISTRY.claim]


def test_the_page_is_what_the_command_writes():
    assert (REPO / "docs" / "report.md").read_text(encoding="utf-8") == page(REGISTRY, KEPT)


@pytest.mark.parametrize("claim", [one for one in REGISTRY.claim if one.command], ids=lambda one: one.name)
def test_every_command_is_one(claim):
    program, *words = shlex.split(claim.command)
    if program == "glm5":
        assert callable(parse(words).run)
    else:
        assert (program, words[0]) == ("python", "-m")
        assert importlib.util.find_spec(words[1]) is not None


@pytest.mark.parametrize("run", REGISTRY.run, ids=lambda one: one.name)
def test_every_arm_can_be_read(run):
    assert run.measure in MEASURES
    for arm in run.arms.values():
        settings = [one for one in (*run.set, *arm) if "=" in one]
        if run.recipe is not None:
            (read_rl_recipe if run.measure == "policy" else read_recipe)(REPO / run.recipe, tuple(settings))


def test_kept_results_are_of_the_registry():
    """A changed arm is measured again; results of other commands say where they are from."""
    runs = {one.name: one for one in REGISTRY.run}
    claimed = {one.run for one in REGISTRY.claim}
    for file in KEPT.glob("*.json"):
        found = json.loads(file.read_text())
        assert file.stem in claimed
        if file.stem in runs:
            arms = {name: list(arm) for name, arm in runs[file.stem].arms.items()}
            assert {name: arm["settings"] for name, arm in found["arms"].items()}.items() <= arms.items()
        else:
            assert found["source"].startswith("docs/")


def argv(tmp_path, *words):
    folders = ("--results", str(tmp_path / "kept"), "--work", str(tmp_path / "work"))
    return ["report", *folders, "--page", str(tmp_path / "page.md"), *words]


def test_a_row_goes_on_by_seed(tmp_path, capsys):
    (tmp_path / "kept").mkdir()
    assert main(argv(tmp_path, "--row", "muon-split-heads", "--seeds", "1")) == 0
    assert "muon-split-heads: held (69" in capsys.readouterr().out
    claim = next(one for one in REGISTRY.claim if one.name == "muon-split-heads")
    run = next(one for one in REGISTRY.run if one.name == claim.run)
    left = list(missing(claim, run, Results(tmp_path / "kept", run.name), None))
    assert left == [("Muon", 1), ("Muon Split", 1), ("Muon", 2), ("Muon Split", 2)]
    assert main(argv(tmp_path, "--row", "muon-split-heads")) == 0
    assert "seeds 0, 1, 2" in capsys.readouterr().out
    assert main(argv(tmp_path)) == 0
    assert "Of " + str(len(NAMES)) + " rows 1 are measured, 1 of them" in (tmp_path / "page.md").read_text()


def test_a_seed_without_the_figure_is_missing(tmp_path):
    claim = next(one for one in REGISTRY.claim if one.name == "dsa-linear")
    run = next(one for one in REGISTRY.run if one.name == claim.run)
    results = Results(tmp_path, run.name)
    metrics = {figure[1]: 1.0 for figure in (claim.left, claim.right)}
    results.add("all", [], 0, metrics)
    results.add("all", [], 1, {claim.left[1]: 1.0})
    assert list(missing(claim, run, results, None)) == [("all", 1), ("all", 2)]


def test_the_list_has_every_row(tmp_path, capsys):
    assert main(argv(tmp_path, "--list")) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == NAMES
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("muon-splt-heads", "--row: got muon-splt-heads; did you mean muon-split-heads?"),
        ("gqa", "--row gqa: it is not measured: cannot be tested here: there is no grouped-query attention"),
    ],
)
def test_what_cannot_be_measured_is_said(tmp_path, capsys, row, message):
    assert main(argv(tmp_path, "--row", row)) == 2
    assert capsys.readouterr().err.startswith(f"glm5: error: {message}")


@pytest.mark.long
@pytest.mark.parametrize(
    "row",
    ["muon-split-logits", "mla-256", "int4-aware", "kl-removed", "group-repair", "token-exact", "dsa-linear", "dsa-rl"],
)
def test_a_fixed_set_of_rows_runs(tmp_path, capsys, monkeypatch, row):
    monkeypatch.chdir(REPO)
    (tmp_path / "kept").mkdir()
    assert main(argv(tmp_path, "--row", row, "--seeds", "1")) == 0
    assert f"{row}: " in capsys.readouterr().out
