"""A sequence's place in its grammar: which tokens may come next, also after drafts that are not certain yet.

Masks are the grammar's; tokens are drawn under them on the device. A sequence's mask needs its last token, so it sits
out the step in which that token is still unread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from glm5.common.extras import require

_FREE = -1  # every bit set


class Matcher:
    """Follows one sequence through a compiled grammar (`Compilation.result`).

    `starts_after`: the grammar holds from the token after this one on, such as `</think>`; None: from the first.
    After the end token everything is allowed: what is drawn then is nobody's.
    """

    def __init__(self, compiled: Any, starts_after: int | None = None) -> None:
        self._matcher = require("xgrammar", "grammar").GrammarMatcher(compiled)
        self._starts_after = starts_after

    def advance(self, token_ids: Sequence[int]) -> bool:
        """The sequence's next tokens; False where one is not allowed, and the sequence has left its grammar."""
        return all(self._take(token_id) is not None for token_id in token_ids)

    def fill(self, drafts: Sequence[int], mask_JM: Tensor) -> None:
        """Row j of mask_JM, int32 [at least 1 + len(drafts), ceil(W / 32)], on the host: what may follow j drafts.

        Rows after a draft that is not allowed are free: that draft will not stand, and they with it. The sequence's
        place in its grammar stays as it was.
        """
        starts_after, num_taken = self._starts_after, 0
        mask_JM.fill_(_FREE)
        words_JM = mask_JM.numpy()
        for row in range(len(drafts) + 1):
            if self._starts_after is None and not self._matcher.is_terminated():
                self._matcher.fill_next_token_bitmask(mask_JM, row)
            # Asking the matcher instead would have it complain of every refusal on stderr.
            if row == len(drafts) or not _has(words_JM[row], drafts[row]):
                break
            taken = self._take(drafts[row])
            assert taken is not None, f"the mask allows {drafts[row]}, the matcher does not"
            num_taken += taken
        if num_taken:
            self._matcher.rollback(num_taken)
        self._starts_after = starts_after

    def _take(self, token_id: int) -> int | None:
        """How many tokens the grammar advanced by: 0 before it starts and after it ended; None if not allowed."""
        if self._starts_after is not None:
            if token_id == self._starts_after:
                self._starts_after = None
            return 0
        if self._matcher.is_terminated():
            return 0
        return 1 if self._matcher.accept_token(token_id) else None


def _has(words_M: NDArray[np.int32], token_id: int) -> bool:
    """Whether the token's bit is set; ids that are none, such as a missing draft's, have no bit."""
    return 0 <= token_id < 32 * len(words_M) and bool(words_M[token_id >> 5] >> (token_id & 31) & 1)
