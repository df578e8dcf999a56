"""Progress of long operations: a bar with rate and ETA on a terminal, a line every few seconds in a log."""

import os
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

LOG_EVERY_SECONDS = 5.0


class Progress:
    """Counts up to `total` of `unit` (for example "B", "step", "token"); `total` None if unknown.

        with Progress(total=num_bytes, unit="B", desc="load") as progress:
            progress.update(len(chunk), shard=3)

    Keyword figures of `update` are shown behind the bar. Bytes get K/M/G prefixes.
    """

    def __init__(self, total: int | None, unit: str, desc: str, stream: TextIO | None = None) -> None:
        self.total, self.unit, self.desc = total, unit, desc
        self.num_done = self._num_written = 0
        self._stream = sys.stderr if stream is None else stream
        self._metrics: dict[str, object] = {}
        self._bar: tqdm[Any] | None = None
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> "Progress":
        self._start = self._last_line = time.monotonic()
        if self._stream.isatty() and _width(self._stream) != 0:
            self._bar = tqdm(
                total=self.total,
                unit=self.unit,
                desc=self.desc,
                file=self._stream,
                unit_scale=self.unit == "B",
                dynamic_ncols=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self.num_done != self._num_written:
            self._write_line()

    def update(self, n: int = 1, **metrics: object) -> None:
        """Add `n` done; `metrics` (name=value) replace those shown before."""
        self.num_done += n
        self._metrics.update(metrics)
        if self._bar is not None:
            if metrics:
                self._bar.set_postfix_str(self._metric_text(), refresh=False)
            self._bar.update(n)
            if not n:  # tqdm draws for progress only
                self._bar.refresh()
        elif (now := time.monotonic()) - self._last_line >= LOG_EVERY_SECONDS:
            self._last_line = now
            self._write_line()

    def _write_line(self) -> None:
        self._num_written = self.num_done
        seconds = max(time.monotonic() - self._start, 1e-9)
        rate = self.num_done / seconds
        parts = [f"{self.desc}: {self._done()}", f"{self._amount(rate)}/s"]
        if self.total is not None and rate > 0 and self.num_done < self.total:
            parts.append(f"ETA {tqdm.format_interval((self.total - self.num_done) / rate)}")
        else:
            parts.append(f"in {tqdm.format_interval(seconds)}")
        if self._metrics:
            parts.append(self._metric_text())
        with suppress(OSError):  # whoever reads the log may have gone; the operation goes on
            self._stream.write(", ".join(parts) + "\n")
            self._stream.flush()

    def _done(self) -> str:
        if self.total is None:
            return self._amount(self.num_done)
        if self.unit == "B":
            return f"{self._amount(self.num_done)}/{self._amount(self.total)}"
        return f"{self.num_done}/{self._amount(self.total)}"

    def _amount(self, number: float) -> str:
        if self.unit == "B":
            return f"{tqdm.format_sizeof(number, 'B')}"
        return f"{number:.4g} {self.unit}" if isinstance(number, float) else f"{number} {self.unit}"

    def _metric_text(self) -> str:
        return ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in self._metrics.items()
        )


def _width(stream: TextIO) -> int | None:
    """Columns of a terminal: 0 if unknown (a pseudo-terminal without a size), None if it is not a file."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except OSError:
        return None
