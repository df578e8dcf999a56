"""The server's Prometheus counters before and after a run, and their difference.

Metrics have vLLM's names, which glm5 shares, with or without `_total`; labels of engine and model are summed over. If
the server has no such page or counter, the value is None, not 0.
"""

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import msgspec

from glm5.bench.serve.client import Client
from glm5.bench.serve.failure import RequestFailed

LINE = re.compile(r"^([a-zA-Z_:][\w:]*?)(?:_total)?(?:\{(.*)\})? ([^ ]+)(?: -?\d+)?$")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
SPEC, PREFIX = "vllm:spec_decode_num_", "vllm:prefix_cache_"
TIERS = "glm5:prefix_cache_hit_tokens"
KEPT_LABELS = ("position", "tier")
SIMULATED = "glm5:simulated_acceptance"
NAMES = (SPEC, PREFIX, TIERS, SIMULATED, "vllm:num_preemptions")

Counts = dict[tuple[str, str], float]
"""Values by counter and by its position or tier, "" where it has none."""


@dataclass(frozen=True)
class Deltas:
    """What a run added to the server's counters.

    `per_position`: share of steps in which the draft at that position was accepted. `acceptance_length`: tokens per
    step, including the one that needs no draft. `prefix_*`: prompt tokens looked up in the cache and found, in total or
    by tier. `simulated_acceptance`: drafts were accepted at random with so many tokens per step on average.
    """

    acceptance_length: float | None = None
    acceptance_rate: float | None = None
    per_position: tuple[float, ...] = ()
    num_drafts: int | None = None
    prefix_queries: int | None = None
    prefix_hits: int | None = None
    hits_by_tier: dict[str, int] | None = None
    preemptions: int | None = None
    simulated_acceptance: float | None = None


async def read_counters(client: Client) -> Counts | None:
    """Current counters, or None if the server has none."""
    try:
        page = (await client.fetch("GET", "/metrics")).decode("utf-8", "replace")
    except RequestFailed:
        return None
    return parse(page)


def parse(page: str) -> Counts:
    """The counters `NAMES` of a Prometheus page."""
    counts: defaultdict[tuple[str, str], float] = defaultdict(float)
    for line in page.splitlines():
        if line.startswith(NAMES) and (found := LINE.match(line)):
            labels = dict(LABEL.findall(found[2] or ""))
            kept = next((labels[name] for name in KEPT_LABELS if name in labels), "")
            counts[found[1], kept] += _number(found[3])
    return dict(counts)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def deltas(before: Counts | None, after: Counts | None) -> Deltas:
    """The difference between two readings."""
    if before is None or after is None:
        return Deltas()
    change = {key: value - before.get(key, 0.0) for key, value in after.items()}

    def count(name: str) -> int | None:
        return round(change[name, ""]) if (name, "") in change else None

    drafts, drafted, accepted = (count(SPEC + name) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    positions = {at: value for (name, at), value in change.items() if name == SPEC + "accepted_tokens_per_pos"}
    per_position = {int(at): value for at, value in positions.items() if at.isdecimal()}
    tiers = {tier: round(value) for (name, tier), value in change.items() if name == TIERS}
    return Deltas(
        acceptance_length=1 + (accepted or 0) / drafts if drafts else None,
        acceptance_rate=(accepted or 0) / drafted if drafted else None,
        per_position=tuple(per_position[at] / drafts for at in sorted(per_position)) if drafts else (),
        num_drafts=drafts,
        prefix_queries=count(PREFIX + "queries"),
        prefix_hits=count(PREFIX + "hits"),
        hits_by_tier=tiers or None,
        preemptions=count("vllm:num_preemptions"),
        simulated_acceptance=after.get((SIMULATED, "")) or None,
    )


async def sglang_acceptance(client: Client) -> float | None:
    """Mean tokens per step since an SGLang server started, as it reports them; None without speculative decoding."""
    try:
        info: Any = msgspec.json.decode(await client.fetch("GET", "/get_server_info"))
        value = info["internal_states"][0]["avg_spec_accept_length"]
    except (RequestFailed, msgspec.DecodeError, KeyError, IndexError, TypeError):
        return None
    return float(value) if isinstance(value, int | float) else None
