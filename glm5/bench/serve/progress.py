"""The progress line of a run: requests with rate and ETA, current tokens per second, running requests, errors."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self, TextIO

from glm5.bench.serve.load import Outcome, Plan, Report
from glm5.common.progress import Progress


class LoadProgress:
    """One progress line per run. `start` returns the `Report` of `load.run`."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, plan: Plan) -> Report:
        """Open the line of a run."""
        desc = "open load" if plan.clients is None else f"{plan.clients} client{'s' * (plan.clients != 1)}"
        progress = self._open.enter_context(Progress(plan.num_requests, "req", desc, self._stream))
        num_shown, tokens_before, time_before = 0, 0.0, None

        def report(outcome: Outcome, now: float) -> None:
            nonlocal num_shown, tokens_before, time_before
            tokens, seconds = _tokens(outcome), now - (outcome.start if time_before is None else time_before)
            values: dict[str, object] = {"running": len(outcome.running)}
            if seconds > 0:
                values["tok/s"] = max(0.0, tokens - tokens_before) / seconds
            if outcome.num_failed:
                values["failed"] = outcome.num_failed
            progress.update(outcome.num_ended - num_shown, **values)
            num_shown, tokens_before, time_before = outcome.num_ended, tokens, now

        return report

    def close(self) -> None:
        """End the line."""
        self._open.close()


def _tokens(outcome: Outcome) -> float:
    """Tokens so far. Chunks of running requests count with the mean tokens per chunk of complete answers."""
    per_chunk = outcome.completed_tokens / outcome.completed_chunks if outcome.completed_chunks else 1.0
    return outcome.completed_tokens + per_chunk * sum(len(record.arrivals) for record in outcome.running.values())
