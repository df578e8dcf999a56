"""Log-probabilities under the reference of DPO: the model that the stage began with, frozen.

They are computed once, before the first step, and kept in OUT/data/reference-STAGE.npz. A second model beside the one
that learns would cost its memory and a pass in every step; this costs one pass over the pairs, however many epochs
follow. An interrupted computation goes on with what is missing, and a resumed stage finds the file complete. A document
is known by a hash of its ids and loss mask.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from glm5.common.atomic import atomic_write
from glm5.common.bounded import TEXTS, read_bounded
from glm5.common.errors import TrainingError
from glm5.common.progress import Progress
from glm5.train.data.sources import Row
from glm5.train.state import writing_to

SAVE_SECONDS = 30.0


class Reference:
    """`file`: what was computed before, if it exists. Raises TrainingError where it is damaged."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._known: dict[bytes, float] = {}
        if file.exists():
            try:
                with np.load(BytesIO(read_bounded(file, TEXTS, TrainingError)), allow_pickle=False) as arrays:
                    keys, values = arrays["keys"], arrays["values"]
                if keys.dtype != np.uint8 or keys.shape != (*values.shape, 16) or not np.isfinite(values).all():
                    raise ValueError("not a finite number for each key of 16 bytes")
                self._known = dict(zip(map(bytes, keys), values.astype(np.float64).tolist(), strict=True))
            except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
                raise TrainingError(f"{file} is damaged ({error}); --restart begins the run anew") from None

    def complete(
        self, rows: Iterable[Row], num_rows: int, logprobs_of: Callable[[Sequence[Row]], Tensor] | None, size: int
    ) -> None:
        """Compute what is missing of these rows, in passes of `size` rows. `logprobs_of`: sums of documents, [B];
        None where the model is no longer the reference, and TrainingError is raised if anything is missing."""
        saved = time.monotonic()
        waiting: dict[bytes, Row] = {}
        with Progress(num_rows, "row", "log-probabilities of the reference") as progress:
            try:
                for row in rows:
                    keys = keys_of(row)
                    if any(key not in self._known for key in keys):
                        if logprobs_of is None:
                            raise TrainingError(
                                f"{self.file} has no log-probabilities of some pairs, and the model has learnt since: "
                                "put the file, checkpoints.held_out and steps back, or begin anew with --restart"
                            )
                        waiting[b"".join(keys)] = row
                        if len(waiting) == size:
                            self._add(waiting, logprobs_of)
                    if time.monotonic() - saved > SAVE_SECONDS:
                        self._save()
                        saved = time.monotonic()
                    progress.update(1)
                if waiting and logprobs_of is not None:
                    self._add(waiting, logprobs_of)
            finally:
                if logprobs_of is not None:
                    self._save()

    def column(self, rows: Sequence[Row]) -> Tensor:
        """For the tokens of packed rows, [T] in float64: a document's value at its last token, else 0."""
        column_T = torch.zeros(sum(len(row.ids) for row in rows), dtype=torch.float64)
        at = 0
        for row in rows:
            for length, key in zip(row.lengths, keys_of(row), strict=True):
                at += length
                column_T[at - 1] = self._known[key]
        return column_T

    def _add(self, waiting: dict[bytes, Row], logprobs_of: Callable[[Sequence[Row]], Tensor]) -> None:
        rows = list(waiting.values())
        keys = [key for row in rows for key in keys_of(row)]
        values = logprobs_of(rows).double().cpu()
        if not values.isfinite().all():
            raise TrainingError("a log-probability of the reference is not finite: look at the checkpoint and the data")
        self._known |= zip(keys, values.tolist(), strict=True)
        waiting.clear()

    def _save(self) -> None:
        keys = np.frombuffer(b"".join(self._known), np.uint8).reshape(len(self._known), -1)
        with writing_to(self.file):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(self.file, "wb") as handle:
                np.savez(handle, keys=keys, values=np.array(list(self._known.values())))


def keys_of(row: Row) -> list[bytes]:
    """The keys of a row's documents."""
    ends = np.cumsum([0, *row.lengths]).tolist()
    return [
        blake2b(row.ids[a:b].tobytes() + row.weights[a:b].tobytes(), digest_size=16).digest() for a, b in pairwise(ends)
    ]
