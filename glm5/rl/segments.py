"""The tokens of a rollout, as a tree of segments: each holds only what it adds to its parent.

A conversation in which nothing is edited is a path. A history that was edited, compacted or retried is a branch, and a
segment that several branches share is sampled, stored and trained once. The tokens of a leaf's path are exactly what
the engine saw and sampled.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from glm5.engine.frontend.outputs import Delta

Experts = NDArray[np.int16]


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits for what these parts name."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


@dataclass
class Segment:
    """Tokens that follow those of `parent` (the index of a segment; None: from the beginning).

    Context (a prompt, what an environment said, a template's tokens) has ids alone. Of sampled tokens, one entry each:
    `logprobs`, of the distribution that they were drawn from (temperature and kept vocabulary included); `versions` of
    the weights that computed them; `key_versions`, the oldest version among the keys that they attended to, empty if
    that is `versions`. `context_versions`: of the keys that the cache had when the first was sampled, as runs of
    (version, tokens) from the beginning of the path; empty if it had none of a session. Optional: `experts` int16
    [tokens, MoE layers, experts a token], of every token for which the engine reported them (-1: unknown); `kept`, the
    vocabulary that top_k, top_p and min_p left (`kept_ids`). What a teacher says of sampled tokens, under the same
    temperature and vocabulary: `teacher_logprobs`, and its likeliest tokens, `teacher_top`, with theirs.
    """

    token_ids: list[int]
    parent: int | None = None
    is_sampled: bool = False
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    key_versions: list[int] = field(default_factory=list)
    context_versions: list[tuple[int, int]] = field(default_factory=list)
    experts: Experts | None = None
    kept: list[bytes] | None = None
    teacher_logprobs: list[float] = field(default_factory=list)
    teacher_top: list[list[tuple[int, float]]] = field(default_factory=list)

    def add(self, delta: "Delta") -> None:
        """More of the answer that is being sampled."""
        version, count, runs = delta.version, len(delta.token_ids), delta.key_versions
        if runs is not None:
            oldest = min([version, *(of_keys for of_keys, _ in runs)])
            if not self.token_ids:
                self.context_versions = runs
        else:  # as before, or all of new weights
            oldest = self.key_versions[-1] if self.versions[-1:] == [version] else version
        self.token_ids += delta.token_ids
        self.logprobs += delta.tempered_logprobs
        self.versions += [version] * count
        self.key_versions += [oldest] * count
        if delta.sampling_mask:
            self.kept = self.kept or []
            self.kept += delta.sampling_mask

    def check(self) -> None:
        """ValueError where columns and tokens do not fit each other."""
        count = len(self.token_ids)
        wanted = count if self.is_sampled else 0
        for name, got, allowed in (
            ("logprobs", len(self.logprobs), (wanted,)),
            ("versions", len(self.versions), (wanted,)),
            ("key_versions", len(self.key_versions), (0, wanted)),
            ("teacher_logprobs", len(self.teacher_logprobs), (0, wanted)),
            ("teacher_top", len(self.teacher_top), (0, wanted)),
        ):
            if got not in allowed:
                raise ValueError(f"a segment of {count} tokens, sampled: {self.is_sampled}, has {got} {name}")
        if self.kept is not None and len(self.kept) != count:
            raise ValueError(f"a segment of {count} tokens has {len(self.kept)} kept vocabularies")


class SegmentTree:
    """Segments in the order in which they were added; a parent comes before its children."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []

    def add(self, segment: Segment) -> int:
        """Add a segment; returns its index. ValueError if it is inconsistent, or its parent is not in the tree."""
        segment.check()
        if segment.parent is not None and not 0 <= segment.parent < len(self.segments):
            raise ValueError(f"parent {segment.parent} of a new segment; the tree has {len(self.segments)}")
        self.segments.append(segment)
        return len(self.segments) - 1

    def path(self, leaf: int) -> list[int]:
        """Indices from the root to `leaf`."""
        found: list[int] = []
        index: int | None = leaf
        while index is not None:
            found.append(index)
            index = self.segments[index].parent
        return found[::-1]

    def leaves(self) -> list[int]:
        """Segments without children, in order."""
        parents = {segment.parent for segment in self.segments}
        return [index for index in range(len(self.segments)) if index not in parents]

    def token_ids(self, leaf: int) -> list[int]:
        """All tokens of a path."""
        return [token_id for index in self.path(leaf) for token_id in self.segments[index].token_ids]

    def trained(self, left_out: Collection[int] = ()) -> "SegmentTree":
        """The tree without these sampled segments, and without contexts that nothing was sampled after."""
        needed = {
            each
            for index, one in enumerate(self.segments)
            if one.is_sampled and index not in left_out
            for each in self.path(index)
        }
        tree, places = SegmentTree(), dict[int | None, int | None]({None: None})
        for index in sorted(needed):
            one = self.segments[index]
            places[index] = tree.add(replace(one, parent=places[one.parent]))
        return tree

    @property
    def num_sampled(self) -> int:
        """Sampled tokens of the tree, each counted once."""
        return sum(len(segment.token_ids) for segment in self.segments if segment.is_sampled)

    @property
    def oldest_version(self) -> int | None:
        """The oldest weights that sampled a token, or computed a key that one attended to; None without tokens."""
        versions = [v for segment in self.segments for v in (*segment.versions, *segment.key_versions)]
        return min(versions, default=None)
