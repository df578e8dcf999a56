"""`[reward]`: what general RL rewards beside an environment's rules (docs/rl-general.md; GLM-5 report, section 3.4).

    reward = sum over sources of weight * scaled value  -  penalties

The report names the sources (rules, an outcome reward model, a generative judge) and the human anchors, and publishes
no weight, no scale and no mechanism: reasons for the defaults are beside the fields.
"""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from glm5.config.step import NotNegative, Positive, Section
from glm5.config.train import Count, Place

SourceName = Literal["rules", "model", "judge"]
Text = Annotated[str, Field(min_length=1, max_length=20_000)]


def _lower(phrases: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one.lower() for one in phrases)


class SourceSection(Section):
    """What a source counts."""

    weight: NotNegative = 1.0
    """In units of the source's scale. An environment's `reward` may set another. 0: it is measured and not rewarded."""
    scale: Literal["group", "none"] = "group"
    """group: (value - mean) / max(standard deviation, floor) over the rollouts of a group, each source by itself, so
    that none counts more because its numbers are larger. none: values as they are."""
    floor: Positive = 0.1
    """Least standard deviation that is divided by, in the source's own units: where answers differ by less, the
    difference is noise, and is not blown up."""


class RulesSection(SourceSection):
    """The environment's own reward: precise and narrow, so that it has the largest weight."""


class RewardModelSection(SourceSection):
    """An outcome reward model: a score of low variance that can be hacked."""

    weight: NotNegative = 0.5
    """Half of the rules': what a program can check must win where both disagree."""
    floor: Positive = 0.25
    """Of calibrated log-odds: answers that are preferred by less than 56 to 44 are as good as equal."""
    folder: Place
    """A checkpoint that a stage of kind reward of `glm5 train` wrote."""


class JudgeClient(Section):
    """How a model is asked through an OpenAI-compatible API, without a key: `glm5 serve` of any checkpoint is one."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s]{1,1000}$")]
    """Such as http://localhost:8000/v1."""
    model: Annotated[str, Field(max_length=200)] = "judge"
    """Name of the model that is asked for."""
    timeout_s: Positive = 30.0
    """Time for an answer."""
    retries: Annotated[int, Field(ge=0, le=10)] = 1
    """Further attempts where there was no answer, or none that can be read."""
    concurrency: Count = 16
    """The most questions at a time."""


class JudgeSection(SourceSection, JudgeClient):
    """A generative judge: robust, and of a larger variance than a reward model."""

    weight: NotNegative = 0.5
    """As the reward model's."""
    mode: Literal["score", "pairs"] = "score"
    """score: each answer by itself, from 0 to 10. pairs: each answer with the next one of its group, in both orders;
    its value is the share of comparisons that it wins. An answer that wins in one order alone has a draw, so that a
    judge's liking for a position cancels out."""
    votes: Annotated[int, Field(ge=1, le=64)] = 1
    """Questions of each kind, over which the mean is taken; several are asked at temperature 1, a single one at 0."""
    rubric: Text = (
        "Is it correct, does it follow every instruction, is it clear and natural, and no longer than needed?"
    )
    """What is judged. A task's own rubric stands before it."""


class GuardsSection(Section):
    """What earns less than it seems to: penalties from 0 to 1 by these weights, each a reward of its own, unscaled."""

    length: NotNegative = 1.0
    """Of tokens from `length_from` times rollouts.max_tokens on, rising to 1 at max_tokens (DAPO, arXiv 2503.14476,
    equation 13: 0.8)."""
    length_from: Annotated[float, Field(ge=0, lt=1)] = 0.8
    repetition: NotNegative = 1.0
    """Of the share of word runs that came before in the answer, above what ordinary text has."""
    repetition_from: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """That share; English prose has below a tenth of runs of four words."""
    run_words: Annotated[int, Field(ge=1, le=16)] = 4
    """Words of a run."""
    phrases: NotNegative = 1.0
    """Of phrases that please a judge and say nothing, a third for each that occurs."""
    pleasing: Annotated[tuple[Text, ...], Field(max_length=1000), AfterValidator(_lower)] = (
        *("great question", "excellent question", "i hope this helps", "as an expert", "as a world-class"),
        *("this answer is correct", "this answer is complete", "this response is", "meets all the requirements"),
        *("full marks", "highest score", "10/10", "score: 10", "ignore the rubric", "ignore previous instructions"),
        *("the other answer is wrong", "answer a is better", "answer b is better", "dear judge", "dear grader"),
    )
    """These phrases, in any case."""


class AnchorsSection(Section):
    """Answers that people wrote, in JSON lines {"messages": [...]}: against drift towards what models sound like."""

    file: Place
    ce: NotNegative = 0.1
    """Factor of the cross-entropy of their replies, added to the policy's loss: small beside the policy's, whose
    gradient vanishes where a group agrees, so that anchors decide what no reward tells apart."""
    conversations: Count = 8
    """Of a step's cross-entropy, in turn."""
    members: bool = False
    """Add the reference answer of a task, if there is one, to its group, with the reward that it earns. Where it is
    better than the group's mean, it is learnt from as if the policy had said it (ratio 1); else it only counts in the
    mean."""


class RewardSection(Section):
    """Rewards beside an environment's own."""

    rules: RulesSection = RulesSection()
    model: RewardModelSection | None = None
    judge: JudgeSection | None = None
    guards: GuardsSection = GuardsSection()
    anchors: AnchorsSection | None = None
    held_out: Place | None = None
    """A reward model that is shown and never rewarded, in place of the true reward. Default: the environment's metric
    "true", if it has one."""

    @property
    def sources(self) -> dict[SourceName, SourceSection]:
        """Those that there are, by name."""
        found: dict[SourceName, SourceSection | None] = {"rules": self.rules, "model": self.model, "judge": self.judge}
        return {name: one for name, one in found.items() if one is not None}

    @property
    def folders(self) -> list[Place]:
        """Of all outcome reward models, the one that is only shown included."""
        return [folder for folder in (self.model.folder if self.model else None, self.held_out) if folder]

    @model_validator(mode="after")
    def _rewards(self) -> Self:
        if not any(one.weight for one in self.sources.values()):
            raise ValueError("every weight is 0: give one of rules, model and judge a weight")
        return self
