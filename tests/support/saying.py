"""What a model says about a text, choices included, and how far two models are apart in it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.model.seams import Selection
from glm5.testing.numerics import rel_rms


class WatchingView(PackedView):
    """Notes what the indexers choose."""

    def __init__(self, length: int):
        super().__init__([length])
        self.chosen: list[Tensor] = []

    def select(self, *args, **kwargs) -> Selection:
        selection = super().select(*args, **kwargs)
        assert selection.keys_TK is not None
        self.chosen.append(selection.keys_TK)
        return selection


@dataclass
class Said:
    """Everything that a model decides about a text, and about two drafts in a row at each place of it."""

    logits: Tensor
    drafts: list[Tensor]
    experts: list[Tensor] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)


@torch.inference_mode()
def said(model: Glm5, ids: Tensor, corrections=None, head_by_matrix=False) -> Said:
    experts: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: experts.append(out[1]))
        for layer in model.model.layers
        if hasattr(layer.mlp, "gate")
    ]
    view = WatchingView(len(ids))
    hidden = model(ids, view)
    logits, drafts, keys = model.head(hidden), [], view.chosen
    if corrections is not None:
        hidden = hidden @ corrections.hidden
    for _ in range(2):
        view = WatchingView(len(ids))
        hidden, _ = model.draft(ids.roll(-1), hidden, view)
        keys += view.chosen
        if corrections is None:
            drafts.append(model.head(hidden))
        else:
            own = hidden @ corrections.head.T
            drafts.append(model.head(hidden @ corrections.to_head) if head_by_matrix else own)
            hidden = hidden @ corrections.chained
    for hook in hooks:
        hook.remove()
    return Said(logits, drafts, experts, keys)


def worst(got: Said, want: Said) -> float:
    assert len(got.experts) == len(want.experts)
    assert len(got.keys) == len(want.keys)
    assert all(torch.equal(a, b) for a, b in zip(got.experts, want.experts, strict=True)), "other experts"
    assert all(torch.equal(a, b) for a, b in zip(got.keys, want.keys, strict=True)), "other keys"
    pairs = [(got.logits, want.logits), *zip(got.drafts, want.drafts, strict=True)]
    return max(rel_rms(a, b) for a, b in pairs)
