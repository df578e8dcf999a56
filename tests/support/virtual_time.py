"""An event loop whose time jumps: when nothing is ready it is at once the time of the next timer.

with virtual_time() as runner:
    runner.run(main())        # sleeps of any length, in no time, ending at exactly the time asked for
"""

import asyncio
import selectors


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: where a real selector would wait, the loop's time moves on."""

    loop: "VirtualLoop"

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("nothing will ever happen: every task waits for another")
            if timeout > 0:  # to the timer's own time: sums of waits would drift
                self.loop.now = self.loop.next_timer()
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Starts at time 0."""

    def __init__(self) -> None:
        selector = _Jumping()
        selector.loop = self
        self.now = 0.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def next_timer(self) -> float:
        # Rounded to asyncio's resolution of 1 ns, within which a timer is due: else sums of waits are a hair off.
        return round(self._scheduled[0].when(), 9)


def virtual_time() -> asyncio.Runner:
    return asyncio.Runner(loop_factory=VirtualLoop)
