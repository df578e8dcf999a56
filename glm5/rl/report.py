"""OUT/report.html: a page without scripts, with the run's figures at its beginning and end, and curves of all."""

import html
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5.common.plot import plot
from glm5.config.rl import RLRecipe
from glm5.rl.figures import MOST_AGED
from glm5.rl.services import statistics
from glm5.rl.waits import PREDICTED, beside
from glm5.rl.watch import read_metrics
from glm5.train.report import write_page

REPORT = "report.html"
TOGETHER = (
    ("reward/mean", "eval/mean"),
    ("metric/proxy", "metric/true"),
    ("eval/proxy", "eval/true"),
    ("proxy/divergence", "proxy/correlation"),
    ("metric/penalty_length", "metric/penalty_repetition", "metric/penalty_phrases"),
    ("reward/std", "reward/frac_zero_std"),
    ("entropy",),
    ("kl/mismatch",),
    ("logp/abs_diff", "logp/abs_diff_max"),
    ("is/ratio_min", "is/ratio_mean", "is/ratio_p99", "is/ratio_max"),
    ("is/mask_frac", "is/mask_frac_low", "is/mask_frac_high"),
    ("is/ess",),
    ("adv/min", "adv/mean", "adv/max"),
    ("len/mean", "len/max"),
    ("staleness/mean", "staleness/max"),
    tuple(f"staleness/share_{age}" for age in range(MOST_AGED + 1)),
    ("wait/trainer", "wait/engines", "wait/environment"),
    ("group/padded", "group/dropped"),
    ("time/step", "time/rollout", "time/train", "time/push", "time/record"),
)
"""Metrics that share a plot, in this order; all others follow, each in a plot of its own."""
_UNITS = (
    (r"len/truncated|perf/mfu|wait/.*|tool/fail|is/ess|episode/failed.*|.*pass@.*|.*frac.*|.*share_.*", "share"),
    (r"entropy|kl/.*|logp/.*|teacher_kl/.*", "nats a token"),
    (r"len/.*|episode/tokens.*", "tokens"),
    (r"perf/.*tok_s", "tokens a second"),
    (r"push/gb_s", "GB a second"),
    (r"push/bytes", "bytes"),
    (r"perf/peak_gib", "GiB"),
    (r"staleness/.*|keys/age_max", "pushes"),
    (r"time/.*|episode/s.*|.*_s(_.*)?", "seconds"),
)
"""Units of metrics, by patterns of their names; the first that matches holds."""
_IN_TABLE = (
    "reward/mean",
    "eval/mean",
    "eval/proxy",
    "eval/true",
    "entropy",
    "len/mean",
    "turns/mean",
    "time/step",
    "perf/rollout_tok_s",
)


def write_report(out: Path, recipe: RLRecipe) -> Path:
    """Write the page from metrics.jsonl, atomically; returns its path."""
    lines = read_metrics(out)
    tables = table(lines) + services(lines) + comparison(lines)
    return write_page(out / REPORT, recipe.name, tables + "".join(plots(lines, recipe.steps)))


def plots(lines: Sequence[Mapping[str, Any]], steps: int) -> list[str]:
    """A figure for each group of metrics that were recorded."""
    found: dict[str, list[tuple[float, float]]] = {}
    for line in lines:
        for name, value in line.items():
            is_curve = name != "step" and not name.startswith(PREDICTED)
            if is_curve and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, []).append((line["step"], value))
    passes = tuple(name for name in found if name.startswith("eval/pass@"))
    of_services = defaultdict[str, list[str]](list)
    for name in found:
        if name.startswith("service/"):
            of_services[name.split("/")[1]].append(name)
    together = (*TOGETHER, passes, *map(tuple, of_services.values()))
    shared = {name for names in together for name in names}
    groups = (*together, *((name,) for name in sorted(found) if name not in shared))
    figures = (plot({name: found.get(name, []) for name in names}, steps, y=_unit(names)) for names in groups)
    return [figure for figure in figures if figure]


def _unit(names: Sequence[str]) -> str:
    """Of metrics that share a plot; empty for those without one."""
    return next((unit for pattern, unit in _UNITS if names and re.fullmatch(pattern, names[0])), "")


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last value of the figures that are most asked for."""
    values = {name: [line[name] for line in lines if name in line] for name in _IN_TABLE}
    return _table("first", "last", {name: (of[0], of[-1]) for name, of in values.items() if of})


def services(lines: Sequence[Mapping[str, Any]]) -> str:
    """What became of each environment's rollouts."""
    found = statistics(lines)
    names = list(dict.fromkeys(key for one in found.values() for key in one))
    rows = [
        f"<tr><th>{html.escape(name)}</th>"
        + "".join(f"<td>{one[key]:.4g}</td>" if key in one else "<td></td>" for key in names)
        + "</tr>"
        for name, one in found.items()
    ]
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>" if rows else ""


def comparison(lines: Sequence[Mapping[str, Any]]) -> str:
    """What was predicted of an asynchronous run beside what was measured; empty where nothing was predicted."""
    found = beside(lines)
    return _table("predicted", "measured", found) if found else ""


def _table(left: str, right: str, rows: Mapping[str, tuple[float, float]]) -> str:
    cells = (f"<tr><th>{html.escape(name)}</th><td>{a:.4g}</td><td>{b:.4g}</td></tr>" for name, (a, b) in rows.items())
    return f"<table><tr><th></th><th>{left}</th><th>{right}</th></tr>{''.join(cells)}</table>"
