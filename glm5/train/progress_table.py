"""A table of metrics that is redrawn in place on a terminal while a stage trains.

    dsa (sparse)  41/120 [##########....................]  0.31 s a step, ETA 00:24
    loss              1.234   mean 1.301        tokens/s         205,112
    index             0.081   mean 0.093        GiB                 8.77

The mean is over the last MEAN_OF steps. Call `release` before other output, so that the table continues below it.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

_LOSSES = ("loss", "accuracy", "margin", "mtp", "index", "mtp index", "balance")
_OF_PAIRS = ("calibration error", "calibrated error", "temperature")
LEFT = (*_LOSSES, "trunk norm", "indexer norm", "excess load")
_HELD_OUT = ("held-out loss", "held-out accuracy", "bits per byte", "attention recall")
RIGHT = ("tokens/s", "mfu", "GiB", "lr", "tokens", *_HELD_OUT, *_OF_PAIRS)
MEAN_OF, BAR, LEAST_WIDTH = 20, 30, 80
LEAST_SECONDS = 0.1


class ProgressTable:
    """The table of a stage of `total` steps, of which `first` are done. `left` and `right`: the metrics shown; those on
    the left with their means."""

    def __init__(
        self,
        title: str,
        total: int,
        first: int,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        *,
        left: Sequence[str] = LEFT,
        right: Sequence[str] = RIGHT,
    ) -> None:
        self._title, self._total, self._first, self._done = title, total, first, first
        self._stream, self._clock, self._left, self._right = stream, clock, left, right
        self._metrics: dict[str, float] = {}
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=MEAN_OF) for name in left}
        self._start, self._drawn_at, self._height = clock(), float("-inf"), 0

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Update with the metrics of a finished step; redraws at most every LEAST_SECONDS."""
        self._done = step
        self._metrics.update(metrics)
        for name, values in self._recent.items():
            if name in metrics:
                values.append(metrics[name])
        if self._clock() - self._drawn_at >= LEAST_SECONDS or step == self._total:
            self._draw()

    def held_out(self, metrics: Mapping[str, float]) -> None:
        self._metrics.update(metrics)
        self._draw()

    def release(self) -> None:
        """Leave the table on the screen; the next one is drawn below."""
        self._height = 0

    def lines(self) -> list[str]:
        """The lines of the table."""
        done, took = self._done - self._first, self._clock() - self._start
        each = took / max(done, 1)
        filled = BAR * self._done // max(self._total, 1)
        head = (
            f"{self._title}  {self._done}/{self._total} [{'#' * filled}{'.' * (BAR - filled)}]  "
            f"{each:.3g} s a step, ETA {clock_of(each * (self._total - self._done))}"
        )
        left = [f"{name:16}{self._metrics[name]:>10.4g}   {self._mean(name):14}" for name in self._shown(self._left)]
        right = [f"{name:18}{_format_value(self._metrics[name]):>14}" for name in self._shown(self._right)]
        height = max(len(left), len(right))
        left += [" " * 43] * (height - len(left))
        right += [""] * (height - len(right))
        return [head, *(f"{a:43}  {b}".rstrip() for a, b in zip(left, right, strict=True))]

    def _shown(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name in self._metrics]

    def _mean(self, name: str) -> str:
        values = self._recent[name]
        return f"mean {sum(values) / len(values):.4g}" if values else ""

    def _draw(self) -> None:
        width, height = terminal_size(self._stream)
        # Moves to the first line of the previous table and rewrites each line; longer lines would wrap, and lines that
        # are scrolled off the screen cannot be reached.
        lines = self.lines()[: max(1, height - 1)]
        up = f"\x1b[{self._height}F" if self._height else ""
        self._stream.write(up + "".join(f"\x1b[2K{line[: width - 1]}\n" for line in lines) + "\x1b[J")
        self._stream.flush()
        self._height, self._drawn_at = len(lines), self._clock()


def columns(stream: TextIO) -> int:
    """The width of a terminal; 0 if the stream is not a terminal or its width is unknown."""
    return terminal_size(stream).columns


def terminal_size(stream: TextIO) -> os.terminal_size:
    """(columns, lines); zeros where they are unknown."""
    try:
        return os.get_terminal_size(stream.fileno() if stream.isatty() else -1)
    except (OSError, ValueError):
        return os.terminal_size((0, 0))


def clock_of(seconds: float) -> str:
    """[h:]mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def _format_value(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"
