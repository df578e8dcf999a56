"""Counters, gauges and histograms, and their page in Prometheus' text format (version 0.0.4).

    page = Page({"model_name": "glm-5"})            # labels of every line
    served = page.counter("requests_total", "Requests.", "status")
    served.add(1, "200")
    page.text()

Not thread-safe: used on the event loop's thread only. Where several processes answer requests, each has a page: their
`totals` are added (`merge`), and `text` writes the sums.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Numbers = dict[tuple[str, ...], list[float]]
Totals = dict[str, _Numbers]
"""By metric and label values, numbers that add up over processes: a counter's value, a histogram's counts and sum."""


class Metric:
    """A metric with one line per combination of label values. Without labels it starts as a line with 0."""

    kind = "counter"

    def __init__(self, name: str, about: str, labels: Sequence[str]):
        self.name, self.about, self.labels = name, about, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}
        self._adds_up = self.kind == "counter"  # else the value is that of the whole server, whoever tells it

    def value(self, *labels: str) -> float:
        """The current value; 0 for label values that have not occurred."""
        return self._values.get(labels, 0.0)

    def totals(self) -> _Numbers:
        return {labels: [value] for labels, value in self._values.items()} if self._adds_up else {}

    def lines(self, common: Mapping[str, str], totals: _Numbers) -> Iterator[str]:
        shown = {labels: value for labels, (value,) in totals.items()} if self._adds_up else self._values
        for labels, value in shown.items():
            yield f"{self.name}{_labels(common, self.labels, labels)} {_number(value)}"


class Counter(Metric):
    """A value that only grows."""

    def add(self, count: float, *labels: str) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + count

    def set_total(self, total: float, *labels: str) -> None:
        """Set the total from a counter kept elsewhere, which may have restarted at 0."""
        self._values[labels], self._adds_up = float(total), False


class Gauge(Metric):
    """A value that goes up and down."""

    kind = "gauge"

    def set(self, value: float, *labels: str) -> None:
        self._values[labels] = float(value)

    def set_only(self, value: float, *labels: str) -> None:
        """Set the value of these labels; lines of others disappear."""
        self._values = {labels: float(value)}


class Histogram:
    """Counts the observed values in buckets with these upper `bounds`."""

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Sequence[float]):
        self.name, self.about, self.bounds = name, about, tuple(map(float, bounds))
        self.count, self.sum = 0, 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.sum += value

    def totals(self) -> _Numbers:
        return {(): [*map(float, self._counts), self.sum]}

    def lines(self, common: Mapping[str, str], totals: _Numbers) -> Iterator[str]:
        total = 0
        *counts, sum_of_all = totals[()]
        for bound, count in zip((*self.bounds, math.inf), counts, strict=True):
            total += int(count)
            yield f"{self.name}_bucket{_labels(common, ('le',), (_number(bound),))} {total}"
        yield f"{self.name}_sum{_labels(common, (), ())} {_number(sum_of_all)}"
        yield f"{self.name}_count{_labels(common, (), ())} {total}"


class Page:
    """All metrics of a process, in the order of their creation."""

    def __init__(self, labels: Mapping[str, str]):
        self._labels = dict(labels)
        self._metrics: list[Metric | Histogram] = []

    def counter(self, name: str, about: str, *labels: str) -> Counter:
        counter = Counter(name, about, labels)
        self._metrics.append(counter)
        return counter

    def gauge(self, name: str, about: str, *labels: str) -> Gauge:
        gauge = Gauge(name, about, labels)
        self._metrics.append(gauge)
        return gauge

    def histogram(self, name: str, about: str, bounds: Sequence[float]) -> Histogram:
        histogram = Histogram(name, about, bounds)
        self._metrics.append(histogram)
        return histogram

    def totals(self) -> Totals:
        """This process's part of what adds up over processes."""
        return {metric.name: totals for metric in self._metrics if (totals := metric.totals())}

    def text(self, totals: Totals | None = None) -> str:
        """The page in Prometheus' text format. `totals`: of all processes; by default of this one alone."""
        lines: list[str] = []
        totals = self.totals() if totals is None else totals
        for metric in self._metrics:
            lines += [f"# HELP {metric.name} {metric.about}", f"# TYPE {metric.name} {metric.kind}"]
            lines += metric.lines(self._labels, totals.get(metric.name, {}))
        return "\n".join(lines) + "\n"


def merge(into: Totals, more: Totals) -> None:
    """Add totals to `into`."""
    for name, values in more.items():
        mine = into.setdefault(name, {})
        for labels, numbers in values.items():
            before = mine.get(labels, [0.0] * len(numbers))
            mine[labels] = [a + b for a, b in zip(before, numbers, strict=True)]


def _labels(common: Mapping[str, str], names: Sequence[str], values: Sequence[str]) -> str:
    pairs = [*common.items(), *zip(names, values, strict=True)]
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs) + "}" if pairs else ""


def _escaped(value: str) -> str:
    plain = value.encode(errors="replace").decode()  # UTF-8 cannot encode a lone surrogate
    return plain.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if value == math.inf:
        return "+Inf"
    return str(int(value)) if value.is_integer() else repr(value)
