"""Connects the engine's loop with the lower tiers: starts copies, reports their ends, looks up prompts.

Plans request copies, `CopyQueue` executes them, and each gets exactly one `CopyDone`. A copy that the queue refuses
has failed. So has one that takes longer than `COPY_DEADLINE_S`, since a disk may hang: it is cancelled, after which
nothing accesses its page any more.

Prompts are looked up on disk by a separate thread, since the disk may hang there too.
"""

import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait

from glm5.engine.cache.prefix import cache_salt, page_keys
from glm5.engine.scheduler.messages import CopyDone, Message, Submit, Tier, TierChange
from glm5.engine.scheduler.plan import StepPlan
from glm5.engine.tiers.copies import CopyQueue
from glm5.engine.tiers.key import PageKey

COPY_DEADLINE_S = 5.0
LOOKUP_DEADLINE_S = 0.25


class Lookup:
    """A running lookup of a prompt's pages. After `deadline` its request no longer waits for it."""

    def __init__(self, deadline: float):
        self.future: Future[TierChange | None] = Future()
        self.deadline = deadline

    def is_over(self) -> bool:
        return self.future.done() or time.monotonic() >= self.deadline

    def wait(self, timeout_s: float) -> None:
        """Wait until it is over, at most `timeout_s`."""
        wait([self.future], timeout_s)

    def found(self) -> TierChange | None:
        """The tiers of its pages; None if there are none, or if the lookup failed or is late."""
        return self.future.result() if self.future.done() and self.future.exception() is None else None


class Tiering:
    """Runs the copies of plans on `copies`. Only the engine's thread may use it."""

    def __init__(self, copies: CopyQueue, page_size: int):
        self.copies, self.page_size = copies, page_size
        self._handle_of: dict[int, int] = {}
        self._copy_of: dict[int, int] = {}
        self._deadline_of: dict[int, float] = {}
        self._failed: list[int] = []
        self._stores: set[int] = set()
        self._lookups: queue.SimpleQueue[tuple[Submit, bytes, Lookup] | None] = queue.SimpleQueue()
        self._last_lookup: Lookup | None = None
        if copies.disk is not None:
            threading.Thread(target=self._look, name="glm5-lookup", daemon=True).start()

    @property
    def has_stores(self) -> bool:
        """Pages are on their way to a tier."""
        return bool(self._stores)

    def messages(self, timeout_s: float = 0.0) -> list[Message]:
        """Ended copies and moved pages since the last call; waits for the end of a copy, at most `timeout_s`.

        RuntimeError if copying itself failed: the contents of the cache are then unknown.
        """
        self._cancel_late()
        ended: list[Message] = [CopyDone(copy_id, None) for copy_id in self._failed]
        self._failed = []
        for copied in self.copies.done(0.0 if ended else timeout_s):
            copy_id = self._copy_of.pop(copied.handle)
            del self._handle_of[copy_id]
            del self._deadline_of[copy_id]
            self._stores.discard(copy_id)
            ended.append(CopyDone(copy_id, copied.tier))
        # After the ended copies: a tier may have evicted such a page meanwhile.
        if moved := self.copies.moved():
            ended.append(TierChange(tuple(moved)))
        return ended

    def begin_stores(self, plan: StepPlan) -> None:
        """Call it before the plan is launched: the copies wait for the earlier steps, which filled the stored pages."""
        for copy_id in plan.cancelled:
            if copy_id in self._handle_of:
                self.copies.cancel(self._handle_of[copy_id])
        for copy_id, key, page in plan.stores:
            if self._begin(copy_id, self.copies.store(key, page)):
                self._stores.add(copy_id)

    def begin_loads(self, plan: StepPlan) -> None:
        """Call it after the plan is launched: its page copies may still read pages that a load overwrites."""
        for copy_id, key, page in plan.loads:
            self._begin(copy_id, self.copies.load(key, page))

    def cancel_stores(self) -> None:
        """Cancel the stores that have not begun to copy."""
        for copy_id in self._stores:
            self.copies.cancel(self._handle_of[copy_id])

    def look_up(self, submit: Submit, weights: bytes) -> Lookup | None:
        """Look for a prompt's pages that another process has stored on disk; None if there can be none.

        (The scheduler knows the pages that this process stored. While the disk hangs, no lookup is started.)
        """
        if self.copies.disk is None or len(submit.prompt_ids) <= self.page_size or submit.computes_prompt:
            return None
        last = self._last_lookup
        if last is not None and last.is_over() and not last.future.done():
            return None
        lookup = self._last_lookup = Lookup(time.monotonic() + LOOKUP_DEADLINE_S)
        self._lookups.put((submit, weights, lookup))
        return lookup

    def clear(self) -> None:
        """Forget all pages of all tiers."""
        self.copies.clear()

    def close(self, flush_s: float) -> None:
        """Wait at most `flush_s` for copies and writes under way, then end the threads."""
        self.copies.flush(flush_s)
        self.copies.close()
        self._lookups.put(None)

    def _begin(self, copy_id: int, handle: int | None) -> bool:
        if handle is None:
            self._failed.append(copy_id)
            return False
        self._handle_of[copy_id], self._copy_of[handle] = handle, copy_id
        self._deadline_of[copy_id] = time.monotonic() + COPY_DEADLINE_S
        return True

    def _cancel_late(self) -> None:
        if not self._deadline_of:
            return
        now = time.monotonic()
        for copy_id, deadline in self._deadline_of.items():
            if deadline <= now:
                # Reported by the queue: at once, unless its page is being copied this instant.
                self.copies.cancel(self._handle_of[copy_id])

    def _look(self) -> None:
        while (job := self._lookups.get()) is not None:
            submit, weights, lookup = job
            try:
                lookup.future.set_result(self._find(submit, weights))
            except Exception as error:  # noqa: BLE001 - a lookup that fails is a miss
                lookup.future.set_exception(error)

    def _find(self, submit: Submit, weights: bytes) -> TierChange | None:
        seen: list[PageKey] = []
        salt = cache_salt(weights, submit.salt)

        def keys() -> Iterator[PageKey]:
            for key in page_keys(submit.prompt_ids, self.page_size, salt):
                seen.append(key)
                yield key

        tiers = self.copies.lookup(keys())
        found: list[tuple[bytes, Tier | None]] = [(key.digest, tier) for key, tier in zip(seen, tiers, strict=False)]
        return TierChange(tuple(found), submit.prompt_ids, weights) if found else None
