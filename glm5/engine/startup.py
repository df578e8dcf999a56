"""How long an engine takes to start, phase by phase: a line in the log for each, and the seconds for whoever asks."""

import logging
import time

from glm5.engine.wire import Loading

logger = logging.getLogger(__name__)

BEGIN = "starting the process"
WEIGHTS = "loading weights"  # what comes after it is the way from weights in memory to ready


class Startup:
    """Hears of every `Loading`; `ready` ends the last phase. `seconds`: of each phase, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._began = BEGIN, time.monotonic()

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in self.seconds.items())

    @property
    def ready_s(self) -> float:
        """From weights in memory to ready."""
        phases = list(self.seconds)
        after = phases[phases.index(WEIGHTS) + 1 :] if WEIGHTS in phases else []
        return sum(self.seconds[phase] for phase in after)

    def hear(self, loading: Loading) -> None:
        if loading.phase != self._phase:
            self._end_phase(loading.phase)

    def ready(self) -> None:
        self._end_phase(BEGIN)

    def _end_phase(self, following: str) -> None:
        now = time.monotonic()
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._began
        logger.info("start: %s took %.1f s", self._phase, now - self._began)
        self._phase, self._began = following, now
