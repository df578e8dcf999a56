"""`[rollouts.context]`: what is done when a conversation with tools grows long (docs/rl-search.md)."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from glm5.config.step import Section

Count = Annotated[int, Field(ge=1, le=2**24)]


class Context(Section):
    """keep_recent, discard_above or both (GLM-5 report, section 4.2.4), or compact_below or compact_every
    (CompactionRL). What follows the last message that is no tool's is edited, never what is before."""

    keep_recent: Count | None = None
    """Replies whose tools' results are kept; those of earlier ones are replaced by a sentence. The report: 5."""
    fold_at: Count = 10
    """Replies with results that gather before all but keep_recent of them are replaced, so that not each makes a fork.
    keep_recent + 1: at once, as reported."""
    discard_above: Count | None = None
    """Tokens of a conversation above which it begins again with the question. The report: 32,000."""
    compact_below: Count | None = None
    """Tokens left of max_model_len below which the policy writes a summary. They must hold a reply, its tools' results,
    the request and the summary."""
    compact_every: Count | None = None
    """Replies with results after which the policy writes a summary, in place of compact_below."""
    keep_steps: Annotated[int, Field(ge=0, le=1000)] = 2
    """Replies with results that follow the summary; fewer where they do not fit."""
    max_compactions: Count = 3
    train_summary: bool = True
    """Whether the tokens of summaries are trained. If not, they are context."""

    @property
    def compacts(self) -> bool:
        """Whether the policy writes summaries."""
        return self.compact_below is not None or self.compact_every is not None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = [self.keep_recent or self.discard_above, self.compact_below, self.compact_every]
        if sum(one is not None for one in ways) != 1:
            raise ValueError("give keep_recent, discard_above or both of them, or compact_below or compact_every alone")
        of_compaction = ("keep_steps", "max_compactions", "train_summary")
        for keys, has_key, with_key in (
            (("fold_at",), self.keep_recent is not None, "keep_recent"),
            (of_compaction, self.compacts, "compact_below or compact_every"),
        ):
            changed = [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
            if not has_key and changed:
                raise ValueError(f"{changed[0]} has no effect without {with_key}")
        if self.keep_recent is not None and self.fold_at <= self.keep_recent:
            raise ValueError(f"fold_at {self.fold_at} must be above keep_recent {self.keep_recent}")
        return self
