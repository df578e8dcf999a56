"""Settings of `glm5 report`, and the sections of its registry of claims, `glm5/bench/claims/claims.toml`.

[[run]]      what is trained or computed, in arms that are compared, with several seeds
[[claim]]    a sentence of the report, the two figures of a run that test it, and the rule by which it is held
"""

from typing import Annotated, Self

from pydantic import Field, model_validator

from glm5.config.command import Command, Count
from glm5.config.step import Section
from glm5.config.train import Name, Place


class ReportConfig(Command):
    """Claims of the GLM-5 report, tested small. Alone, write the page from the results that are kept; with --row,
    measure the seeds of a row that are missing."""

    row: str | None = None
    """Measure this row: what is missing of its seeds. Rows that were measured by another command run that command."""
    list_: Annotated[bool, Field(alias="list")] = False
    """Print the names of the rows with their results, and write nothing."""
    seeds: Count | None = None
    """With --row: only so many of its seeds."""
    results: str = "docs/performance/report"
    """Folder of the results, a JSON file for each run."""
    page: str = "docs/report.md"
    """File to write."""
    work: str = "runs/report"
    """Folder for trainings, each of which is deleted once it is measured."""


class RunSection(Section):
    """Arms that are compared: the settings that each has over those of the run."""

    name: Name
    measure: str
    """How an arm is measured: a name in glm5/bench/claims/measures.py."""
    about: str
    """What is measured, and its size: the page says it."""
    recipe: Place | None = None
    """Recipe of the trainings."""
    set: tuple[str, ...] = ()
    """KEY=VALUE of the recipe, in all arms."""
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = (0, 1, 2)
    arms: Annotated[dict[str, tuple[str, ...]], Field(min_length=1)]
    """KEY=VALUE of each arm; of a measure without a recipe, its own words."""


Figure = tuple[str, str]
"""An arm of the run, and a metric of it."""


class ClaimSection(Section):
    """A row of the page. It is measured by a run, or its result is taken from elsewhere, or it cannot be tested small.

    Held: the 95 % interval of left - right over the seeds lies between `low` and `high`. Not held: it lies outside of
    them. Anything else is not decided. Without `right`, left itself is compared.
    """

    name: Name
    stage: str
    """Heading of its table."""
    report: str
    """What the report says, with figure and section."""
    ours: str = ""
    """What left and right are, in words."""
    run: Name | None = None
    """Run, and the name of the file of its results."""
    left: Figure | None = None
    right: Figure | None = None
    low: float | None = None
    high: float | None = None
    command: str | None = None
    """Of a row whose results were measured by another command than this one."""
    why: str | None = None
    """Why it was not, or cannot be, tested here."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.run is None) == (self.why is None):
            raise ValueError(f"{self.name}: give either run or why")
        if self.run is not None and (self.left is None or self.low is self.high is None):
            raise ValueError(f"{self.name}: give left, and low or high")
        return self


class Registry(Section):
    """All of it."""

    run: tuple[RunSection, ...]
    claim: tuple[ClaimSection, ...]

    @model_validator(mode="after")
    def _names(self) -> Self:
        names = [one.name for one in self.claim]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two claims are called {twice[0]}")
        runs = {one.name: one for one in self.run}
        for one in self.claim:
            if one.run is None or one.command is not None:
                continue
            if one.run not in runs:
                raise ValueError(f"{one.name}: there is no run {one.run}")
            for figure in (one.left, one.right):
                if figure is not None and figure[0] not in runs[one.run].arms:
                    raise ValueError(f"{one.name}: {one.run} has no arm {figure[0]}")
        return self
