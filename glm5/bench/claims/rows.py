"""The rows of the registry: measured, listed, and written as a page."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from time import monotonic

from glm5.bench.claims.page import page
from glm5.bench.claims.results import Results
from glm5.common.atomic import atomic_write
from glm5.common.errors import UsageError
from glm5.config.report import ClaimSection, Registry, ReportConfig, RunSection
from glm5.config.toml import nearest, read_toml
from glm5.train.state import locked


def registry() -> Registry:
    return read_toml(str(files("glm5.bench.claims") / "claims.toml"), (), Registry)


def measure(settings: ReportConfig, say: Callable[[str], None]) -> str:
    """Measure what is missing of a row; returns its line. Raises UsageError for a row that cannot be measured."""
    known = registry()
    claim = next((one for one in known.claim if one.name == settings.row), None)
    if claim is None:
        close = nearest(str(settings.row), [one.name for one in known.claim])
        raise UsageError(f"--row: got {settings.row}; {close} (--list names all)")
    if claim.why is not None:
        raise UsageError(f"--row {claim.name}: it is not measured: {claim.why}")
    if claim.command is not None:
        words = shlex.split(claim.command)
        say(f"{claim.command}\nits results are to be compared with those of the page, which it does not write")
        start = [sys.executable, "-m", "glm5"] if words[0] == "glm5" else [sys.executable]
        code = subprocess.run([*start, *words[1:]], check=False).returncode
        if code:
            raise UsageError(f"--row {claim.name}: its command ended with {code}")
        return claim.name
    run = next(one for one in known.run if one.name == claim.run)
    results = Results(Path(settings.results), run.name)
    with locked(Path(settings.work), "work"):
        for arm, seed in missing(claim, run, results, settings.seeds):
            say(f"{run.name}, {arm}, seed {seed}")
            results.add(arm, run.arms[arm], seed, _measured(run, arm, seed, Path(settings.work, run.name)))
    return _line(claim, Path(settings.results))


def missing(claim: ClaimSection, run: RunSection, results: Results, seeds: int | None) -> Iterator[tuple[str, int]]:
    """Arms of a claim and seeds whose figure is not there, the first seed of all arms first."""
    figures = [figure for figure in (claim.left, claim.right) if figure is not None]
    for seed in run.seeds[:seeds]:
        for arm in dict.fromkeys(arm for arm, _ in figures):
            found = results.seeds(arm, run.arms[arm]).get(str(seed), {})
            if any(metric not in found for of, metric in figures if of == arm):
                yield arm, seed


def _measured(run: RunSection, arm: str, seed: int, folder: Path) -> dict[str, float]:
    from glm5.bench.claims.measures import MEASURES

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = monotonic()
    try:
        found = MEASURES[run.measure](run.recipe, (*run.set, *run.arms[arm]), seed, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**found, "seconds": round(monotonic() - began, 1)}


def listed(settings: ReportConfig) -> str:
    """A line for each row."""
    return "\n".join(_line(claim, Path(settings.results)) for claim in registry().claim)


def _line(claim: ClaimSection, folder: Path) -> str:
    outcome = None if claim.run is None else Results(folder, claim.run).outcome(claim)
    if outcome is None:
        return f"{claim.name}: {'not tested' if claim.run is None else 'not run yet'}"
    spread = f" ± {outcome.half:.3g}" if outcome.half else ""
    return f"{claim.name}: {outcome.verdict} ({outcome.mean:.4g}{spread}, seeds {', '.join(outcome.seeds)})"


def write_page(settings: ReportConfig) -> Path:
    """Write the page from the results that are kept."""
    file = Path(settings.page)
    with atomic_write(file) as handle:
        handle.write(page(registry(), Path(settings.results)))
    return file
