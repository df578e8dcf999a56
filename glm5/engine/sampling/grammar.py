"""A sequence's place in its grammar: which tokens may come next, also after drafts that are not certain yet.

Masks are the grammar's; tokens are drawn under them on the device. A sequence's mask needs its last token, so it sits
out the step in which that token is still unread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from glm5.common.extras import require

MAX_SECONDS = 0.5  # a usual grammar takes microseconds, a large one for a large vocabulary milliseconds
_FREE = -1  # every bit set


class Matcher:
    """Follows one sequence through a compiled grammar (`Compilation.result`).

    `starts_after`: the grammar holds from the token after this one on, such as `</think>`; None: from the first.
    Until then anything may come but `not_before`, and after `budget` tokens nothing but `starts_after`. Without
    `compiled` anything may follow it. After the end token everything is allowed, because later tokens are discarded.
    `is_slow`: a single call took so long that it delayed all requests; some grammars are made to.
    """

    def __init__(
        self,
        compiled: Any | None,
        starts_after: int | None = None,
        *,
        not_before: Sequence[int] = (),
        budget: int | None = None,
    ) -> None:
        self._matcher = None if compiled is None else require("xgrammar", "grammar").GrammarMatcher(compiled)
        self._starts_after, self._not_before, self._budget = starts_after, frozenset(not_before), budget
        self.is_slow = False

    def advance(self, token_ids: Sequence[int]) -> bool:
        """The sequence's next tokens; False where one is not allowed, and the sequence has left its grammar."""
        start = time.thread_time()
        is_allowed = all(self._take(token_id) is not None for token_id in token_ids)
        self._note(start)
        return is_allowed

    def fill(self, drafts: Sequence[int], bitmask: Tensor) -> None:
        """Row j of bitmask, int32 [at least 1 + len(drafts), ceil(W / 32)], on the host: what may follow j drafts.

        Rows after a draft that is not allowed are free: neither it nor those after it will be accepted. The
        sequence's place in its grammar stays as it was.
        """
        start = time.thread_time()
        starts_after, budget, num_taken = self._starts_after, self._budget, 0
        bitmask.fill_(_FREE)
        words = bitmask.numpy()
        for row in range(len(drafts) + 1):
            if self._starts_after is not None:
                self._fill_before(words[row])
            elif self._matcher is not None and not self._matcher.is_terminated():
                self._matcher.fill_next_token_bitmask(bitmask, row)
            # Asking the matcher instead would have it complain of every refusal on stderr.
            if row == len(drafts) or not _has(words[row], drafts[row]):
                break
            taken = self._take(drafts[row])
            assert taken is not None, f"the mask allows {drafts[row]}, the matcher does not"
            num_taken += taken
        if num_taken and self._matcher is not None:
            self._matcher.rollback(num_taken)
        self._starts_after, self._budget = starts_after, budget
        self._note(start)

    def _note(self, start: float) -> None:
        # Of this thread's own time: a busy machine makes no grammar slow.
        self.is_slow = self.is_slow or time.thread_time() - start > MAX_SECONDS

    def _fill_before(self, words: NDArray[np.int32]) -> None:
        """What may come before the grammar holds."""
        if self._budget == 0:
            words.fill(0)
            _put(words, self._starts_after, allowed=True)
        for token_id in self._not_before:
            _put(words, token_id, allowed=False)

    def _take(self, token_id: int) -> int | None:
        """How many tokens the grammar advanced by: 0 before it starts and after it ended; None if not allowed."""
        if self._starts_after is not None:
            if token_id == self._starts_after:
                self._starts_after = None
            elif self._budget == 0 or token_id in self._not_before:
                return None
            elif self._budget is not None:
                self._budget -= 1
            return 0
        if self._matcher is None or self._matcher.is_terminated():
            return 0
        return 1 if self._matcher.accept_token(token_id) else None


def _has(words: NDArray[np.int32], token_id: int) -> bool:
    """Whether the token's bit is set; ids that are none, such as a missing draft's, have no bit."""
    return 0 <= token_id < 32 * len(words) and bool(words[token_id >> 5] >> (token_id & 31) & 1)


def _put(words: NDArray[np.int32], token_id: int | None, *, allowed: bool) -> None:
    """Set or clear the token's bit."""
    if token_id is not None and 0 <= token_id < 32 * len(words):
        unsigned, bit = words.view(np.uint32), np.uint32(1 << (token_id & 31))
        unsigned[token_id >> 5] = unsigned[token_id >> 5] | bit if allowed else unsigned[token_id >> 5] & ~bit
