"""The page of a run, and the table that is printed while it goes on."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from glm5.common.plot import plot
from glm5.config.post_train import PostTrainRecipe
from glm5.post_train.compare import RESAMPLES, Difference, changes, paired, score
from glm5.post_train.needs import aligned
from glm5.train.estimate import GIB, format_duration
from glm5.train.report import write_page

Row = Sequence[str]
_ABOUT_SKILLS = (
    "Mean on held-out tasks, which no stage was trained on: of the reward or, where an environment knows it, of what "
    "should have been rewarded. The last stage answers over HTTP."
)
_ABOUT_SERVED = (
    f"Over HTTP, the same tasks; 95 % interval by paired bootstrap, {RESAMPLES:,} resamples of tasks. Within: nothing "
    "in the interval is a loss of more than"
)
_ABOUT_STAGES = (
    "Time is that of the process that ended the stage; processor time includes its own processes, memory is that of "
    "the largest. Tokens a step: the sampled one and the drafts that were accepted. Tokens a second are the "
    "measurement's."
)


@dataclass
class Results:
    """What is known of a run, by stage. `estimated`: seconds; `took`, `measured`: as the files have them. A
    reward model is not measured; the last stage is, behind the server."""

    recipe: PostTrainRecipe
    estimated: Mapping[str, float | None]
    took: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    measured: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def scores(self, skill: str) -> dict[str, float]:
        """Of the stages that were measured, in order."""
        return {name: score(found["skills"][skill]) for name, found in self.measured.items()}

    @property
    def skills(self) -> list[str]:
        return [one.environment for one in self.recipe.skill]

    @property
    def served(self) -> dict[str, Any] | None:
        """Of the last stage, once it is measured."""
        return self.measured.get(self.recipe.stage[-1].name)

    @cached_property
    def differences(self) -> dict[str, tuple[str, Difference]]:
        """By skill the best stage before the last, and the served model beside it."""
        assert self.served is not None
        found = dict[str, tuple[str, Difference]]()
        for skill in self.skills:
            scores = self.scores(skill)
            best = max([*scores][:-1] or scores, key=lambda name: scores[name])
            found[skill] = best, paired(self.measured[best]["skills"][skill], self.served["skills"][skill])
        return found

    @property
    def is_within(self) -> bool:
        """Whether the served model is within the margin in every skill."""
        return all(found.is_within(self.recipe.evaluation.margin) for _, found in self.differences.values())


def acceptance(found: Mapping[str, Any]) -> str:
    """Tokens a step of an answer that drafts, its own included."""
    steps = found["drafted"][0] if found["drafted"] else 0
    return f"{1 + sum(found['accepted']) / steps:.2f}" if steps else ""


def live_table(results: Results, running: str | None) -> str:
    """What is done, what runs, and how long the rest will take at most; with skills once they are measured."""
    rows = [("stage", "command", "state", "time", *_labels(results), "tokens/step")]
    left = 0.0
    for stage in results.recipe.stage:
        took, found = results.took.get(stage.name), results.measured.get(stage.name)
        state = "done" if took else "running" if stage.name == running else ""
        estimated = results.estimated[stage.name]
        left += 0.0 if took or estimated is None else estimated
        guessed = "" if estimated is None else f"ETA {format_duration(estimated)}"
        shown = (
            [f"{score(found['skills'][skill]):.3f}" for skill in results.skills]
            if found
            else [""] * len(results.skills)
        )
        time = format_duration(took["seconds"]) if took else guessed
        rows.append((stage.name, stage.kind, state, time, *shown, acceptance(found) if found else ""))
    if results.served:
        differences = zip(_labels(results), results.differences.values(), strict=True)
        lines = [verdict(label, *found, results.recipe.evaluation.margin) for label, found in differences]
        return "\n".join([aligned(rows), *lines])
    return f"{aligned(rows)}\nestimated for what is left, measurements aside: {format_duration(left)}"


def _labels(results: Results) -> list[str]:
    return [one.label for one in results.recipe.skill]


def verdict(skill: str, best: str, found: Difference, margin: float) -> str:
    """A sentence on the served model."""
    held = "within" if found.is_within(margin) else "not within"
    return (
        f"{skill}: served minus {best}, the best: {100 * found.mean:+.2f} points, 95 % interval {100 * found.low:+.2f} "
        f"to {100 * found.high:+.2f} ({found.num_tasks:,} tasks), {held} {100 * margin:g}"
    )


def write_post_train_page(path: Path, results: Results) -> Path:
    """Write the page, atomically; returns its path."""
    curves = {one.label: [*enumerate(results.scores(one.environment).values())] for one in results.recipe.skill[:5]}
    last = len(results.measured) - 1
    body = "".join(
        [
            f"<h2>Skills by stage</h2><p>{_ABOUT_SKILLS}</p>",
            _table(_skills(results)),
            plot(curves, max(last, 1), range(1, last), x="stage", y="mean reward"),
            f"<p>Stages: {html.escape(', '.join(f'{i} {name}' for i, name in enumerate(results.measured)))}.</p>",
            "<h2>The served model beside each skill's best stage</h2>",
            f"<p>{_ABOUT_SERVED} {100 * results.recipe.evaluation.margin:g} points.</p>",
            _table(_served(results)),
            "<h2>Stages</h2>",
            f"<p>{_ABOUT_STAGES}</p>",
            _table(_stages(results)),
        ]
    )
    return write_page(path, results.recipe.name, body)


def _skills(results: Results) -> Iterable[Row]:
    """A row for each stage: the score, and what became of the skill."""
    yield ("stage", *_labels(results))
    of = {skill: (results.scores(skill), changes(results.scores(skill))) for skill in results.skills}
    for name in results.measured:
        cells = list[str]()
        for scores, changed in of.values():
            words = [f"{what} {100 * points:.1f}" for what, points in changed[name].items() if points >= 0.0005]
            cells.append(f"{scores[name]:.3f}" + (f" ({', '.join(words)})" if words else ""))
        yield (name, *cells)


def _served(results: Results) -> Iterable[Row]:
    yield ("skill", "best stage", "its score", "served", "difference", "95 % interval", "tasks", "within")
    last = results.recipe.stage[-1].name
    for one in results.recipe.skill:
        scores, (best, found) = results.scores(one.environment), results.differences[one.environment]
        yield (
            one.label,
            best,
            f"{scores[best]:.3f}",
            f"{scores[last]:.3f}",
            f"{100 * found.mean:+.2f} points",
            f"{100 * found.low:+.2f} to {100 * found.high:+.2f}",
            f"{found.num_tasks:,}",
            "yes" if found.is_within(results.recipe.evaluation.margin) else "no",
        )


def _stages(results: Results) -> Iterable[Row]:
    yield ("stage", "command", "time", "processor time", "memory", "size", "tokens/step", "tokens/s", "measuring")
    for stage in results.recipe.stage:
        took, found = results.took[stage.name], results.measured.get(stage.name)
        yield (
            stage.name,
            stage.kind,
            f"{took['seconds']:,.0f} s",
            f"{took['cpu_seconds']:,.0f} s",
            f"{took['peak_bytes'] / GIB:.2f} GiB",
            f"{took['size_bytes'] / 1e6:,.1f} MB",
            *(_pace(found) if found else ("", "", "")),
        )
    seconds = sum(one["seconds"] for one in results.took.values())
    cpu = sum(one["cpu_seconds"] for one in results.took.values())
    all_seconds = seconds + sum(one["all_seconds"] for one in results.measured.values())
    all_cpu = cpu + sum(one["cpu_seconds"] for one in results.measured.values())
    yield ("all", "", f"{all_seconds:,.0f} s", f"{all_cpu:,.0f} s", "", "", "", "", "")


def _pace(found: Mapping[str, Any]) -> Row:
    return acceptance(found), f"{found['tokens'] / found['seconds']:,.0f}", f"{found['all_seconds']:,.0f} s"


def _table(rows: Iterable[Row]) -> str:
    head, *body = rows
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in head)}</tr>{lines}</table>"
