"""The model as a runner calls it: on all rows of a step at once, or in passes of a fixed number of rows.

In passes every operation has the same shape for any batch, so a row's result depends only on that row. A pass runs
through all layers before the next one begins, so later rows of a sequence can read the keys of earlier ones.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.engine.runner.inputs.view import StepView
from glm5.model.glm5 import Glm5
from glm5.model.seams import Selection


class Pass(Protocol):
    """Runs the rows of one pass."""

    def hidden(self, ids_T: Tensor, view: StepView) -> Tensor: ...

    def draft(
        self, next_ids_T: Tensor, hidden_TD: Tensor, view: StepView, selection: Selection | None
    ) -> tuple[Tensor, Selection]: ...


class Passes:
    """`num_rows`: the rows of a pass; None runs all rows at once. `fused`: the fused form of the model, if it is used.

    `generation` counts how often the weights have moved. `captured`: passes as CUDA graphs, if captured.
    """

    def __init__(self, model: Glm5, num_rows: int | None, fused: FusedModel | None = None):
        self.model, self.num_rows, self.fused, self.generation = model, num_rows, fused, 0
        self._place = None if fused is None else fused.place
        self.captured: Pass | None = None

    def weights_changed(self) -> None:
        """The model's weights have changed, and may have moved."""
        if self.fused is not None:
            self.fused.refresh()
            if (place := self.fused.place) != self._place:
                self._place = place
                self.generation += 1

    def round_up(self, count: int) -> int:
        """Round a number of rows up to a multiple of a pass."""
        return count if self.num_rows is None else -(-count // self.num_rows) * self.num_rows

    def hidden(self, ids_T: Tensor, view: StepView) -> Tensor:
        """`Glm5.forward`."""
        run = self.model if self.fused is None else self.fused.hidden
        if self.num_rows is None:
            return run(ids_T, view)
        run = run if self.captured is None else self.captured.hidden
        pairs = zip(ids_T.split(self.num_rows), view.parts(self.num_rows), strict=True)
        return torch.cat([run(ids, part) for ids, part in pairs])

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """`Glm5.head`."""
        run: Callable[[Tensor], Tensor] = self.model.head if self.fused is None else self.fused.logits
        if self.num_rows is None:
            return run(hidden_TD)
        return torch.cat([run(part) for part in hidden_TD.split(self.num_rows)])

    def draft(
        self, next_ids_T: Tensor, hidden_TD: Tensor, view: StepView, selection: Selection | None = None
    ) -> tuple[Tensor, Selection]:
        """`Glm5.draft`."""
        run = self.model.draft if self.fused is None else self.fused.draft
        if self.num_rows is None:
            return run(next_ids_T, hidden_TD, view, selection)
        run = run if self.captured is None else self.captured.draft
        size, outs = self.num_rows, []
        for index, part in enumerate(view.parts(size)):
            span = slice(index * size, (index + 1) * size)
            given = None if selection is None else rows_of(selection, span)
            outs.append(run(next_ids_T[span], hidden_TD[span], part, given))
        keys = [used.keys_TK for _, used in outs if used.keys_TK is not None]
        return torch.cat([hidden for hidden, _ in outs]), Selection(torch.cat(keys) if keys else None)


def rows_of(selection: Selection, rows: slice | Tensor) -> Selection:
    """The selection of some rows."""
    return selection if selection.keys_TK is None else Selection(selection.keys_TK[rows])
