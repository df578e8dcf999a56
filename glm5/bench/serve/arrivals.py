"""When an open load sends: times in seconds from its start.

Gaps are gamma distributed with mean 1 / rate and coefficient of variation 1 / sqrt(burstiness): burstiness 1 is a
Poisson process, below 1 comes in bursts, far above 1 is a metronome.
"""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from glm5.common.errors import ConfigError


def arrival_times(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """`num` times, ascending; all 0 for an infinite rate. The same seed gives the same times at any number."""
    if math.isinf(rate):
        return [0.0] * num
    gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1 / (rate * burstiness), num)
    return np.cumsum(gaps).tolist()


def read_arrivals(path: str) -> list[float]:
    """Times from a trace, one a line: seconds, or a JSON object with `timestamp` in milliseconds as Mooncake has it.

    The first becomes 0. Raises ConfigError for a file that cannot be read so, with the line.
    """
    times: list[float] = []
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            times.append(_time_of(line, f"{path}, line {number}"))
    if not times:
        raise ConfigError(f"{path} holds no arrival times")
    for earlier, later in pairwise(times):
        if later < earlier:
            raise ConfigError(f"{path}: times must ascend, got {later:g} s after {earlier:g} s")
    return [time - times[0] for time in times]


def _time_of(line: str, where: str) -> float:
    try:
        value: Any = json.loads(line)
        seconds = float(value["timestamp"]) / 1000 if isinstance(value, dict) else float(value)
    except (ValueError, TypeError, KeyError):
        seconds = math.nan
    if not math.isfinite(seconds):
        allowed = 'a number of seconds, or {"timestamp": MILLISECONDS}'
        raise ConfigError(f"{where}: got {line.strip()[:60]!r}; allowed: {allowed}")
    return seconds
