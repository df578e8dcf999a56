"""Measures an engine's start, phase by phase: logs each phase, repeats a line every few seconds while it lasts, and
keeps the seconds."""

import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from glm5.common.start_log import Waits
from glm5.engine.transport.wire import Loading

logger = logging.getLogger(__name__)

BEGIN = "starting the process"
WEIGHTS = "loading weights"  # the phases after it count as `ready_s`


class Startup:
    """A context manager around the start, which receives every `Loading`. `seconds`: of each phase, in order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self.waits = Waits(BEGIN, clock)

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())

    @property
    def ready_s(self) -> float:
        """Seconds from weights in memory to ready."""
        phases = list(self.seconds)
        after = phases[phases.index(WEIGHTS) + 1 :] if WEIGHTS in phases else []
        return sum(self.seconds[phase] for phase in after)

    def __enter__(self) -> Self:
        self.waits.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.waits.__exit__(kind, error, trace)
        if error is None:
            self._end_phase()

    def receive(self, loading: Loading) -> None:
        if loading.phase != self.waits.what:
            self._end_phase()
            self.waits.begin(loading.phase)
        # While weights are read, the engine's process shows the progress itself.
        self.waits.at(loading.share, is_shown=loading.phase == WEIGHTS and 0 < loading.share < 1)

    def _end_phase(self) -> None:
        phase, seconds = self.waits.what, self.waits.seconds
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        logger.info("start: %s took %.1f s", phase, seconds)
