"""Which experts and keys one run chose, forced upon another that does the same rows elsewhere.

A choice flips on a rounding error where two candidates score alike; what follows then differs by much more. `Recorder`
notes choices of a step by row, `Replayer` gives them back and counts how many it would have made otherwise.
"""

from collections import Counter
from typing import Any

from torch import Tensor

from glm5.model import packed
from glm5.model.moe import Router
from glm5.train.batch import Batch
from glm5.train.step import Step

Choices = dict[tuple[int, int, str, int], Tensor]
"""(step, row, layer or router, which call in a pass) to keys [T, K] or experts [T, A]."""


class _Watching:
    """What both do: know which row a pass is over, and which call of a layer is the next."""

    def __init__(self, step: Step) -> None:
        self.number, self._row, self._mine_T = 0, 0, None
        self._calls: Counter[str] = Counter()
        self._rows: dict[int, tuple[int, Tensor | None]] = {}
        view = step._view

        def noted(batch: Batch) -> Any:
            self._row, self._mine_T = self._rows[id(batch)]
            self._calls.clear()
            return view(batch)

        step._view = noted
        for name, module in step.model.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._hook(name))
        select = packed.PackedView.select

        def selecting(view: Any, layer_idx: int, *given: Any) -> Any:
            chosen = packed.select_keys
            packed.select_keys = lambda *args, **how: self.keys(f"layer {layer_idx}", chosen(*args, **how))
            try:
                return select(view, layer_idx, *given)
            finally:
                packed.select_keys = chosen

        packed.PackedView.select = selecting
        self._restore = lambda: setattr(packed.PackedView, "select", select)

    def over(self, number: int, batches: list[tuple[int, Batch]]) -> None:
        """Step `number` has these rows."""
        self.number = number
        self._rows = {id(batch): (row, getattr(batch, "token_T", None)) for row, batch in batches}

    def close(self) -> None:
        self._restore()

    def _where(self, what: str) -> tuple[int, int, str, int]:
        self._calls[what] += 1
        return self.number, self._row, what, self._calls[what]

    def _hook(self, name: str) -> Any:
        def hook(router: Router, args: tuple[Tensor], routed: tuple[Tensor, Tensor]) -> Any:
            return self.experts(name, router, args[0], routed)

        return hook

    def keys(self, what: str, keys_TK: Tensor) -> Tensor:
        raise NotImplementedError

    def experts(self, what: str, router: Router, x_TD: Tensor, routed: tuple[Tensor, Tensor]) -> Any:
        raise NotImplementedError


class Recorder(_Watching):
    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.choices: Choices = {}

    def keys(self, what: str, keys_TK: Tensor) -> Tensor:
        self.choices[self._where(what)] = keys_TK.clone()
        return keys_TK

    def experts(self, what: str, router: Router, x_TD: Tensor, routed: tuple[Tensor, Tensor]) -> None:
        self.choices[self._where(what)] = routed[1].clone()


class Replayer(_Watching):
    def __init__(self, step: Step, choices: Choices) -> None:
        super().__init__(step)
        self.choices, self.flips, self.requested = choices, 0, 0

    def keys(self, what: str, keys_TK: Tensor) -> Tensor:
        return self._compared(self._given(what), keys_TK)

    def experts(self, what: str, router: Router, x_TD: Tensor, routed: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        expert_TA = self._compared(self._given(what), routed[1])
        score_TE = (x_TD.to(routed[0].dtype) @ router.weight.to(routed[0].dtype).T).sigmoid()
        weight_TA = score_TE.gather(1, expert_TA.long())
        weight_TA = weight_TA / (weight_TA.sum(dim=-1, keepdim=True) + 1e-20)
        return weight_TA * router.cfg.routed_scaling_factor, expert_TA

    def _given(self, what: str) -> Tensor:
        whole = self.choices[self._where(what)]
        return whole if self._mine_T is None else whole[self._mine_T]

    def _compared(self, given: Tensor, own: Tensor) -> Tensor:
        self.requested += len(given)
        self.flips += int((given.sort(dim=-1).values != own.sort(dim=-1).values).any(dim=-1).sum())
        return given


__all__ = ["Choices", "Recorder", "Replayer"]
