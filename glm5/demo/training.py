"""One training step: cross-entropy of what the assistant said, MTP, and the indexer's KL; two optimizers."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.demo.muon import Muon
from glm5.demo.recipe import Recipe
from glm5.model.glm5 import Glm5
from glm5.model.init import init_weights
from glm5.model.moe import Router
from glm5.model.packed import PackedView
from glm5.train.data.dialogues import Example


@dataclass(frozen=True)
class Packed:
    """Conversations one after the other: token ids [T], which of them are labelled, and each one's length."""

    ids_T: Tensor
    labelled_T: Tensor
    lengths: list[int]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Packed":
        ids_T = torch.tensor([token_id for example in examples for token_id in example.ids])
        labelled_T = torch.tensor([mark for example in examples for mark in example.labelled])
        return cls(ids_T, labelled_T, [len(example.ids) for example in examples])

    def targets(self, distance: int) -> tuple[Tensor, Tensor]:
        """Positions p whose token p + distance is labelled and of the same conversation, and those tokens."""
        lengths_B = torch.tensor(self.lengths)
        end_T = torch.repeat_interleave(lengths_B.cumsum(0), lengths_B)
        position_T = torch.arange(len(self.ids_T))
        chosen_T = (position_T + distance < end_T) & self.labelled_T.roll(-distance)
        position_G = position_T[chosen_T]
        return position_G, self.ids_T[position_G + distance]


@torch.no_grad()
def initialize(model: Glm5, recipe: Recipe, seed: int) -> Glm5:
    """Random weights that keep activations near unit scale at any width."""
    init_weights(model, seed)
    std = model.cfg.initializer_range
    for name, weight in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            weight.mul_(recipe.embedding_std / std)
        elif weight.dim() > 1:
            weight.mul_(weight.shape[-1] ** -0.5 / std)
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                weight.mul_(recipe.residual_scale)
    return model


class Trainer:
    """A model in training: its optimizers and what one step does."""

    def __init__(self, model: Glm5, recipe: Recipe):
        self.model, self.recipe = model, recipe
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        named = dict(model.named_parameters())
        # In the order of the model: a saved optimizer state is matched by place.
        self.indexers = [weight for name, weight in named.items() if ".indexer." in name]
        self.trunk = [weight for name, weight in named.items() if ".indexer." not in name]
        matrices = {name: weight for name, weight in named.items() if _is_matrix(name, weight)}
        self.muon = _muon(model, list(matrices.values()), recipe)
        self.adam = _adam({name: weight for name, weight in named.items() if name not in matrices}, recipe)

    def step(self, step: int, batch: Packed) -> dict[str, float]:
        """Train on a batch as step number `step` of the recipe; returns the losses by name."""
        recipe = self.recipe
        self.muon.param_groups[0]["lr"] = recipe.lr(step) * recipe.matrix_lr
        for group in self.adam.param_groups:
            group["lr"] = recipe.lr(step) * group["lr_scale"]
        with _counted(self.routers) as loads:
            losses = self._losses(step, batch)
            torch.stack(list(losses.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.trunk, recipe.max_grad_norm)
        torch.nn.utils.clip_grad_norm_(self.indexers, recipe.max_grad_norm)
        for optimizer in (self.muon, self.adam):
            optimizer.step()
            optimizer.zero_grad()
        for router, load_E in loads.items():
            router.e_score_correction_bias += recipe.bias_step * (load_E.mean() - load_E).sign()
        return {name: loss.item() for name, loss in losses.items()}

    def _losses(self, step: int, batch: Packed) -> dict[str, Tensor]:
        stage = self.recipe.stage(step)
        # In the joint stage indexer and MTP layer learn in turn, which saves a quarter of the time.
        learn_index = stage == "warmup" or (stage == "sparse" and step % 2 == 0)
        learn_mtp = stage == "warmup" or (stage == "sparse" and step % 2 == 1)
        view = PackedView(batch.lengths, stage=stage, learn_index=learn_index)
        hidden_TD = self.model(batch.ids_T, view)
        losses = {"loss": self._cross_entropy(hidden_TD, *batch.targets(1))}
        if learn_index:
            losses["index"] = view.index_loss()
        if learn_mtp:
            view = PackedView(batch.lengths, stage=stage, learn_index=learn_index)
            draft_TD, _ = self.model.draft(batch.ids_T.roll(-1), hidden_TD, view)
            losses["mtp"] = self.recipe.mtp_weight * self._cross_entropy(draft_TD, *batch.targets(2))
            if learn_index:
                losses["mtp index"] = view.index_loss()
        return losses

    def _cross_entropy(self, hidden_TD: Tensor, position_G: Tensor, target_G: Tensor) -> Tensor:
        return F.cross_entropy(self.model.head(hidden_TD[position_G]), target_G)

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def _is_matrix(name: str, weight: Tensor) -> bool:
    """What Muon trains: projections and experts, not embedding, head, router or indexer."""
    others = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
    return weight.dim() > 1 and not name.endswith(others) and ".indexer." not in name


def _muon(model: Glm5, matrices: list[Tensor], recipe: Recipe) -> Muon:
    num_heads = model.cfg.num_attention_heads
    split = (".q_b_proj.weight", ".kv_b_proj.weight")
    heads = {weight: num_heads for name, weight in model.named_parameters() if name.endswith(split)}
    return Muon(matrices, heads, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)


def _adam(rest: dict[str, nn.Parameter], recipe: Recipe) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = []
    for name, weight in rest.items():
        lr_scale = recipe.embedding_lr if name.endswith("embed_tokens.weight") else 1.0
        decay = recipe.weight_decay if name.endswith(("lm_head.weight", "mlp.gate.weight")) else 0.0
        groups.append({"params": [weight], "weight_decay": decay, "lr_scale": lr_scale})
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, fused=True)


@contextmanager
def _counted(routers: Sequence[Router]) -> Iterator[dict[Router, Tensor]]:
    """Tokens per expert of each router, over the forward passes of the block."""
    loads: dict[Router, Tensor] = {}

    def count(router: Router, _args: Any, routed: tuple[Tensor, Tensor]) -> None:
        load_E = torch.bincount(routed[1].flatten(), minlength=router.weight.shape[0]).float()
        loads[router] = loads[router] + load_E if router in loads else load_E

    hooks = [router.register_forward_hook(count) for router in routers]
    try:
        yield loads
    finally:
        for hook in hooks:
            hook.remove()
