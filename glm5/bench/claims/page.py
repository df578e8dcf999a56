"""docs/report.md, made of the registry and the results that are kept."""

from collections.abc import Sequence
from pathlib import Path

from glm5.bench.claims.results import Outcome, Results
from glm5.config.report import ClaimSection, Registry

HEAD = """\
# The report in miniature

What the GLM-5 report (arXiv 2602.15763) claims, tested small: on models of less than a million parameters unless a row
says otherwise, on a CPU. `glm5 report` writes this page from the results in `docs/performance/report/`;
`glm5 report --row NAME` measures a row, or goes on with it, and `glm5 report --list` names the rows. The registry
`glm5/bench/claims/claims.toml` has settings, seeds and rules.

- **held**: the 95 % interval of the mean over the seeds (Student's t, seeds paired) lies within the rule's bounds.
  **not held**: it lies outside of them. **not decided**: it does neither. Of one run, or of means that another page
  gives, the value itself is compared, which says less.
- A small model on a generated task says whether a mechanism works there, not whether it works at 744 billion
  parameters. "Not held" here does not refute the report.
- Values are by seed, in the order of the seeds. What is behind "±" is half of the interval. Rates were not tuned for
  the rows, unless one says so.

{counts}
"""
COLUMNS = ("row", "the report", "here", "values by seed", "rule", "result")


def page(registry: Registry, folder: Path) -> str:
    """The whole page as Markdown. Raises DataError for a file that is not one of results."""
    runs = {one.name: one for one in registry.run}
    done = {one.name: None if one.run is None else Results(folder, one.run).outcome(one) for one in registry.claim}
    parts = [HEAD.format(counts=_counts(list(done.values()), len(registry.claim)))]
    for stage in dict.fromkeys(one.stage for one in registry.claim):
        lines = [COLUMNS, ("---",) * len(COLUMNS)]
        for claim in (one for one in registry.claim if one.stage == stage):
            about = runs[claim.run].about if claim.run in runs else ""
            lines.append(_cells(claim, about, done[claim.name], folder))
        parts.append(f"## {stage}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    return "\n".join(parts)


def _counts(outcomes: Sequence[Outcome | None], total: int) -> str:
    found = [one for one in outcomes if one is not None]
    verdicts = [f"{sum(one.verdict == name for one in found)} {name}" for name in ("held", "not held", "not decided")]
    three = sum(one.num_seeds >= 3 for one in found)
    return (
        f"Of {total} rows {len(found)} are measured, {three} of them with three seeds or more: {', '.join(verdicts)}."
    )


def _cells(claim: ClaimSection, about: str, outcome: Outcome | None, folder: Path) -> tuple[str, ...]:
    name = f"`{claim.name}`"
    if claim.run is None or outcome is None:
        why = claim.why or "not run yet"
        return name, claim.report, " ".join(filter(None, (claim.ours, about))), "", "", why
    document = Results(folder, claim.run).document
    where = f" ({document.get('processor', '')}, {document.get('date', '')})"
    if "source" in document:
        where = f" Source: {document['source']}; `{claim.command}`."
    here = " ".join(filter(None, (claim.ours, about, document.get("note")))) + where
    return name, claim.report, here, _values(claim, outcome), _rule(claim), _verdict(outcome)


def _verdict(outcome: Outcome) -> str:
    return f"**{outcome.verdict}**{' (one run)' if outcome.num_seeds == 1 else ''}"


def _values(claim: ClaimSection, outcome: Outcome) -> str:
    assert claim.left is not None, "it was measured"
    shown = f"{_named(claim, 'left')}: {_joined(outcome.left)}"
    if claim.right is not None:
        shown += f"; {_named(claim, 'right')}: {_joined(outcome.right)}"
    spread = f" ± {outcome.half:.2g}" if outcome.half else ""
    return f"{shown}; {'difference' if claim.right else 'mean'} {outcome.mean:.3g}{spread}"


def _named(claim: ClaimSection, side: str) -> str:
    """The arm, or the metric where both sides are of one arm."""
    figure = getattr(claim, side)
    same = claim.right is None or (claim.left is not None and claim.left[0] == claim.right[0])
    return figure[1] if same else figure[0]


def _joined(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _rule(claim: ClaimSection) -> str:
    what = "difference" if claim.right else "value"
    if claim.low is not None and claim.high is not None:
        return f"{what} from {claim.low:g} to {claim.high:g}"
    return f"{what} at least {claim.low:g}" if claim.low is not None else f"{what} at most {claim.high:g}"
