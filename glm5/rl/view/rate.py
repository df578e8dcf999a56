"""A person compares two replies to a task, blind: /rate/STEP/PLACE of the pages of a run.

Of each recorded group, two rollouts with different replies, in an order that the group's number decides. What is said
goes to OUT/ratings: pairs.jsonl for a stage of kind reward or dpo, anchors.jsonl for `[reward.anchors]`.
"""

import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from glm5.common.atomic import atomic_write
from glm5.rl.records.store import Records
from glm5.rl.records.trace import Trace
from glm5.rl.segments import seed_of

LETTERS = ("A", "B")
MAX_OWN = 20_000
"""Characters of an answer of one's own."""
Messages = list[dict[str, Any]]


class Ratings:
    """Pairs of replies to compare, and the files that verdicts are added to. `token`: what a form must hold, so that
    only a page of this server is answered."""

    def __init__(self, out: Path) -> None:
        self._records, self._folder, self._writing = Records(out), out / "ratings", threading.Lock()
        self.token = secrets.token_urlsafe(16)

    def pair(self, step: int, place: int) -> tuple[Messages, list[Messages]] | None:
        """The prompt, and what follows it in A and in B; None where the group has no two different replies."""
        traces = [one for one in self._records.group(step, place) if one.ok and one.info.messages]
        Random(seed_of("rate", step, place)).shuffle(traces)
        replies: dict[str, Trace] = {json.dumps(_without_calls(one.info.messages)): one for one in traces}
        if len(replies) < 2:
            return None
        first, second = [one.info.messages for one in list(replies.values())[:2]]
        same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)
        is_asked = first[:same] and first[same]["role"] == second[same]["role"] == "assistant"
        return (first[:same], [first[same:], second[same:]]) if is_asked else None

    def rate(self, step: int, place: int, form: Mapping[str, str]) -> None:
        """Keep what a form says. ValueError for one that no page has sent."""
        found, better, own = self.pair(step, place), form.get("better", ""), form.get("own", "").strip()[:MAX_OWN]
        if (
            not secrets.compare_digest(form.get("token", "").encode(), self.token.encode())
            or better not in ("", *LETTERS)
            or not found
        ):
            raise ValueError("not a form of this page")
        prompt, replies = found
        if better:
            chosen, rejected = replies if better == LETTERS[0] else replies[::-1]
            self._add("pairs", {"chosen": prompt + chosen, "rejected": prompt + rejected})
            if form.get("anchor"):
                self._add("anchors", {"messages": prompt + chosen})
        if own:
            self._add("anchors", {"messages": [*prompt, {"role": "assistant", "content": own}]})

    def _add(self, name: str, row: Mapping[str, Any]) -> None:
        self._folder.mkdir(exist_ok=True)
        file = self._folder / f"{name}.jsonl"
        with self._writing:
            before = file.read_bytes() if file.exists() else b""
            with atomic_write(file, "wb") as handle:  # appended to, it could end with half a row
                handle.write(before + json.dumps(row).encode() + b"\n")


def _without_calls(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What tells two conversations apart for a reader."""
    return [(one.get("role"), one.get("content")) for one in messages]
