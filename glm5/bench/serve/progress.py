"""How far a run is, while it lasts: requests with rate and ETA, tokens a second now, what is under way, errors."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self, TextIO

from glm5.bench.serve.load import Outcome, Plan, Tell
from glm5.common.progress import Progress


class LoadProgress:
    """One progress line a run. `start` gives what `load.run` tells."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, plan: Plan) -> Tell:
        """A line for this run."""
        desc = "open load" if plan.clients is None else f"{plan.clients} client{'s' * (plan.clients != 1)}"
        progress = self._open.enter_context(Progress(plan.num_requests, "req", desc, self._stream))
        num_shown, tokens_before, time_before = 0, 0.0, None

        def tell(outcome: Outcome, now: float) -> None:
            nonlocal num_shown, tokens_before, time_before
            tokens, seconds = _tokens(outcome), now - (outcome.start if time_before is None else time_before)
            figures: dict[str, object] = {"running": len(outcome.running)}
            if seconds > 0:
                figures["tok/s"] = max(0.0, tokens - tokens_before) / seconds
            if outcome.num_failed:
                figures["failed"] = outcome.num_failed
            progress.update(outcome.num_ended - num_shown, **figures)
            num_shown, tokens_before, time_before = outcome.num_ended, tokens, now

        return tell

    def close(self) -> None:
        """End the line."""
        self._open.close()


def _tokens(outcome: Outcome) -> float:
    """Tokens so far. Of what is under way only chunks are known; they count as those of whole answers did."""
    per_chunk = outcome.whole_tokens / outcome.whole_chunks if outcome.whole_chunks else 1.0
    return outcome.whole_tokens + per_chunk * sum(len(record.arrivals) for record in outcome.running.values())
