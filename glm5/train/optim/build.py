"""The optimizers of a model: Muon and AdamW over its parameters by name, with a common schedule and state."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glm5.common.errors import CheckpointError
from glm5.config.model import ModelConfig
from glm5.config.step import OptimizerConfig
from glm5.train.optim.exchange import AllToAll, Exchange, RowSplit
from glm5.train.optim.muon import Muon
from glm5.train.optim.newton_schulz import COEFFICIENTS
from glm5.train.optim.table import Rule, is_matrix, row_sizes, rule_of

INDEXER = ".indexer."
_torch: Any = torch  # for its operations on lists of tensors, which are public in all but name


@dataclass(frozen=True)
class Shards:
    """Sharding of the parameters: each of the `size` ranks holds the rows `spans` of tensors of `shapes`.

    `swap`: all-to-all among these ranks. `total`: sums a tensor over all ranks of the run.
    """

    shapes: Mapping[str, tuple[int, ...]]
    spans: Callable[[str], Sequence[Sequence[tuple[int, int]]]]
    rank: int
    size: int
    swap: AllToAll
    total: Callable[[Tensor], Tensor]


def row_split(shape: Sequence[int], rows: tuple[int, ...], spans: Sequence[Sequence[tuple[int, int]]]) -> RowSplit:
    """The matrices and shards of a tensor of this shape. `rows`: its `table.row_sizes`."""
    return RowSplit(math.prod(shape[:-1]), shape[-1], rows or (shape[-2],), spans)


class Optimizers:
    """Muon and AdamW over the parameters of `named` that require a gradient, in that order.

    `state_dict` uses the model's names and has the same structure before the first step, after it, and after a load. It
    holds all that updates depend on besides weights and learning rate; `load_state_dict` needs the same structure.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        model: ModelConfig,
        cfg: OptimizerConfig,
        shards: Shards | None = None,
    ):
        self.cfg, self.shards = cfg, shards
        self.named = {name: weight for name, weight in named.items() if weight.requires_grad}
        rules = {name: rule_of(name, cfg) for name in self.named}
        self.muon = self._muon(rules, model)
        self.adamw = self._adamw(rules)

    @property
    def each(self) -> tuple[torch.optim.Optimizer, ...]:
        return tuple(one for one in (self.muon, self.adamw) if one is not None)

    def step(self, lr: float) -> None:
        """Update every parameter that has a gradient, at this learning rate of the schedule."""
        for optimizer in self.each:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["lr_scale"]
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()

    def clip(self) -> dict[str, Tensor]:
        """Clip gradients to `max_grad_norm`; returns the norms before clipping, "trunk" and "indexer", scalars.

        The indexers have a loss of their own: clipped together, large gradients of one would scale down the other.
        """
        limit = float("inf") if self.cfg.max_grad_norm is None else self.cfg.max_grad_norm
        parts = {"trunk": [], "indexer": []}
        for name, weight in self.named.items():
            if weight.grad is not None:
                parts["indexer" if INDEXER in name else "trunk"].append(weight)
        if self.shards is None:
            return {part: torch.nn.utils.clip_grad_norm_(weights, limit) for part, weights in parts.items() if weights}
        norms = self.shards.total(self._squares(parts.values())).sqrt()
        for weights, norm in zip(parts.values(), norms, strict=True):
            torch.nn.utils.clip_grads_with_norm_(weights, limit, norm)
        return {part: norm for part, norm in zip(parts, norms, strict=True) if norm}

    def _squares(self, parts: Iterable[list[nn.Parameter]]) -> Tensor:
        """Sums of squares of this rank's rows of gradients, one for each part, float64."""
        grads_of_parts = [[weight.grad for weight in weights if weight.grad is not None] for weights in parts]
        squares = next(iter(self.named.values())).new_zeros(len(grads_of_parts), dtype=torch.float64)
        for number, grads in enumerate(grads_of_parts):
            if grads:
                wide = torch.promote_types(grads[0].dtype, torch.float32)
                norms = _torch._foreach_norm(grads, 2, dtype=wide)
                squares[number] = torch.stack(norms).double().square().sum()
        return squares

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """{parameter: {"momentum"} or {"step", "exp_avg", "exp_avg_sq"}}: the tensors themselves."""
        return {name: dict(state) for name, state in self._states()}

    @torch.no_grad()
    def load_state_dict(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy in place. Raises CheckpointError where names, keys or shapes differ from this optimizer's."""
        if wrong := sorted(states.keys() ^ self.named.keys()):
            raise CheckpointError(f"optimizer state: saved and trained parameters differ, first in {wrong[0]}")
        for name, state in self._states():
            got = states[name]
            if got.keys() != state.keys() or any(got[key].shape != state[key].shape for key in state):
                shapes = {key: list(one.shape) for key, one in got.items()}
                raise CheckpointError(
                    f"optimizer state of {name}: got {shapes}, this optimizer has "
                    f"{ {key: list(one.shape) for key, one in state.items()} }; "
                    "resume with the optimizer settings of the saved run, or start from its weights alone"
                )
            for key, tensor in state.items():
                tensor.copy_(got[key])

    @torch.no_grad()
    def reset(self) -> None:
        """Forget all earlier steps: the state is that before the first."""
        for _, state in self._states():
            for tensor in state.values():
                tensor.zero_()

    def state_bytes(self) -> int:
        return sum(one.nbytes for _, state in self._states() for one in state.values())

    def _states(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        of: dict[Tensor, dict[str, Tensor]] = {}
        for optimizer in self.each:
            of.update(optimizer.state)
        for name, weight in self.named.items():
            yield name, of[weight]

    def _groups(self, rules: Mapping[str, Rule], optimizer: str) -> list[dict[str, Any]]:
        """Parameters that share rate and weight decay."""
        groups: dict[tuple[float, float], list[nn.Parameter]] = {}
        for name, rule in rules.items():
            if rule.optimizer == optimizer:
                decay = self.cfg.weight_decay if rule.decays else 0.0
                groups.setdefault((self._lr_scale(name), decay), []).append(self.named[name])
        return [{"params": params, "lr_scale": scale, "weight_decay": wd} for (scale, wd), params in groups.items()]

    def _lr_scale(self, name: str) -> float:
        scale = self.cfg.matrix_lr if is_matrix(name, self.cfg) else 1.0
        if INDEXER in name:
            scale *= self.cfg.indexer_lr
        return scale * (self.cfg.embedding_lr if name.endswith("embed_tokens.weight") else 1.0)

    def _muon(self, rules: Mapping[str, Rule], model: ModelConfig) -> Muon | None:
        if not (groups := self._groups(rules, "muon")):
            return None
        rows = {self.named[name]: row_sizes(rule, model) for name, rule in rules.items() if rule.rows}
        exchange = None
        if self.shards is not None:
            cuts = {
                name: row_split(self.shards.shapes[name], row_sizes(rule, model), self.shards.spans(name))
                for name, rule in rules.items()
                if rule.optimizer == "muon"
            }
            exchange = Exchange(cuts, self.shards.rank, self.shards.size, self.shards.swap)
        return Muon(
            groups,
            rows,
            momentum=self.cfg.momentum,
            update_rms=self.cfg.update_rms,
            coefficients=COEFFICIENTS[self.cfg.coefficients],
            momentum_dtype=None if self.cfg.momentum_dtype is None else getattr(torch, self.cfg.momentum_dtype),
            shards=None if exchange is None else ({name: self.named[name] for name in exchange.names}, exchange),
        )

    def _adamw(self, rules: Mapping[str, Rule]) -> torch.optim.AdamW | None:
        if not (groups := self._groups(rules, "adamw")):
            return None
        adamw = torch.optim.AdamW(groups, lr=0.0, betas=self.cfg.betas, eps=self.cfg.eps, fused=True)
        for group in adamw.param_groups:
            for weight in group["params"]:  # torch would make it in the first step
                adamw.state[weight] |= {
                    "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }
        return adamw
