"""A table of figures that is drawn again in place: what a terminal shows of a stage while it trains.

    dsa (sparse)  41/120 [##########....................]  0.31 s a step, ETA 00:24
    loss              1.234   mean 1.301        tokens/s         205,112
    index             0.081   mean 0.093        GiB                 8.77

The mean is that of the last steps. Lines that others write stay: after `leave` the table goes on below them.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TextIO

LEFT = ("loss", "mtp", "index", "mtp index", "balance", "trunk norm", "indexer norm", "excess load")
RIGHT = ("tokens/s", "mfu", "GiB", "lr", "tokens", "held-out loss", "held-out accuracy", "attention recall")
MEAN_OF, BAR, LEAST_WIDTH = 20, 30, 80
LEAST_SECONDS = 0.1


class ProgressTable:
    """The table of a stage of `total` steps, of which those before `first` are done."""

    def __init__(
        self, title: str, total: int, first: int, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._title, self._total, self._first, self._done = title, total, first, first
        self._stream, self._clock = stream, clock
        self._figures: dict[str, float] = {}
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=MEAN_OF) for name in LEFT}
        self._start, self._drawn_at, self._height = clock(), float("-inf"), 0

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step that is done; drawn unless the last time was just now."""
        self._done = step
        self._figures.update(figures)
        for name, values in self._recent.items():
            if name in figures:
                values.append(figures[name])
        if self._clock() - self._drawn_at >= LEAST_SECONDS or step == self._total:
            self._draw()

    def held_out(self, figures: Mapping[str, float]) -> None:
        self._figures.update(figures)
        self._draw()

    def leave(self) -> None:
        """Go below the table, which stays as it is."""
        self._height = 0

    def lines(self) -> list[str]:
        """What is drawn."""
        done, took = self._done - self._first, self._clock() - self._start
        each = took / max(done, 1)
        filled = BAR * self._done // max(self._total, 1)
        head = (
            f"{self._title}  {self._done}/{self._total} [{'#' * filled}{'.' * (BAR - filled)}]  "
            f"{each:.3g} s a step, ETA {clock_of(each * (self._total - self._done))}"
        )
        left = [f"{name:16}{self._figures[name]:>10.4g}   {self._mean(name):14}" for name in self._shown(LEFT)]
        right = [f"{name:18}{_told(self._figures[name]):>14}" for name in self._shown(RIGHT)]
        height = max(len(left), len(right))
        left += [" " * 43] * (height - len(left))
        right += [""] * (height - len(right))
        return [head, *(f"{a:43}  {b}".rstrip() for a, b in zip(left, right, strict=True))]

    def _shown(self, names: tuple[str, ...]) -> list[str]:
        return [name for name in names if name in self._figures]

    def _mean(self, name: str) -> str:
        values = self._recent[name]
        return f"mean {sum(values) / len(values):.4g}" if values else ""

    def _draw(self) -> None:
        lines, width = self.lines(), columns(self._stream)
        # Up to the first line of the table drawn before, then each line anew; a line that is too long would be two.
        up = f"\x1b[{self._height}F" if self._height else ""
        self._stream.write(up + "".join(f"\x1b[2K{line[: width - 1]}\n" for line in lines) + "\x1b[J")
        self._stream.flush()
        self._height, self._drawn_at = len(lines), self._clock()


def columns(stream: TextIO) -> int:
    """Of a terminal; 0 for what is none, or does not know them."""
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    except (OSError, ValueError):
        return 0


def clock_of(seconds: float) -> str:
    """[h:]mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def _told(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e4 else f"{value:.4g}"
