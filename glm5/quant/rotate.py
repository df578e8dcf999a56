"""QuaRot for MLA, DSA and MoE: norm weights are folded into the following matrices, then weights are rotated.

    fold      norm(x) diag(g) W^T = norm(x) (W diag(g))^T                  the norm's weight is then 1
    rotate    inputs: W <- W R        outputs: W <- R^T W                  norm(x R) = norm(x) R once g = 1

The network computes the same function: logits, router and indexer see the same products. Nothing is rotated at run
time, except for drafts (`mtp_corrections`): the MTP layer shares the head and reads the trunk's last hidden state, and
after folding neither contains the weight of the final norm.
Source: QuaRot (arXiv 2404.00456); msModelSlim `model/glm_5/quarot.py` for the sides to rotate, which graph.py lists.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.quant.chunks import chunks, stacked, wide
from glm5.quant.graph import ROTATIONS, Part, Rotated, RotationName, place
from glm5.quant.hadamard import Rotation, random_hadamard, shifted_blocks
from glm5.quant.record import Step

Steps = dict[str, list[Step]]

_ROWS = 64  # rotated at a time, at least, because additions are vectorised along rows


def rotations(
    cfg: ModelConfig, names: Iterable[RotationName], seed: int = 1234, *, upstream: bool = False
) -> dict[RotationName, Rotation]:
    """Random rotations of the sizes of `cfg`. `upstream`: msModelSlim's fixed rotation for the q latent."""
    made: dict[RotationName, Rotation] = {}
    for idx, (name, facts) in enumerate(ROTATIONS.items()):
        size = getattr(cfg, facts.size)
        if name in set(names):
            random = random_hadamard(size, seed + idx)
            made[name] = shifted_blocks(size) if upstream and name == "q latent" else random
    return made


def fold(tensors: Mapping[str, Tensor], names: Iterable[RotationName]) -> tuple[dict[str, Tensor], Steps]:
    """The tensors that change when the norms that the named rotations need are folded, and a step for each change.

    `tensors` must hold complete layers, so that norms come with their readers, and `model.norm` with `lm_head`.
    """
    wanted = {f.norm: f for name in names for f in ROTATIONS[name].folds}
    changed, steps = dict[str, Tensor](), Steps()
    for norm_name, weight in tensors.items():
        layer, short = place(norm_name)
        if (facts := wanted.get(short)) is None:
            continue
        for name in tensors:
            if place(name)[0] == layer and place(name)[1] in facts.into and name.endswith(".weight"):
                changed[name] = scale_inputs(changed.get(name, tensors[name]), weight, facts.part)
                steps.setdefault(name, []).append(Step("folded", norm_name, "inputs"))
        changed[norm_name] = torch.ones_like(weight)
    return changed, steps


def scale_inputs(weight: Tensor, factor: Tensor, part: Part = "all") -> Tensor:
    """weight [..., O, I] with its inputs multiplied by factor [..., I], or [I / 2] for a half; rounded once."""
    factor = wide(factor).unsqueeze(-2)
    if part == "all":
        return (wide(weight) * factor).to(weight.dtype)
    first, second = wide(weight).chunk(2, -1)
    halves = (first * factor, second) if part == "first half" else (first, second * factor)
    return torch.cat(halves, -1).to(weight.dtype)


def rotate(
    tensors: Mapping[str, Tensor], cfg: ModelConfig, by: Mapping[RotationName, Rotation]
) -> tuple[dict[str, Tensor], Steps]:
    """The tensors that change under the rotations, and a step for each change.

    `tensors` may be any part of the model. They are rotated in float32 (float64 for float64), then rounded to their
    dtype. Raises ConfigError for a norm that is not 1.
    """
    changed, steps = dict[str, Tensor](), Steps()
    unfolded = {f.norm for name in by for f in ROTATIONS[name].folds}
    for name, weight in tensors.items():
        _, short = place(name)
        if short in unfolded and not bool((weight == 1).all()):
            raise ConfigError(f"{name} is not 1: fold norms into the matrices behind them before rotating")
        for rotation_name, rotation in by.items():
            for rotated in ROTATIONS[rotation_name].sides:
                if rotated.tensor == short and name.endswith(".weight"):
                    changed[name] = _rotated(changed.get(name, tensors[name]), cfg, rotated, rotation)
                    steps.setdefault(name, []).append(Step("rotated", rotation_name, rotated.side))
    return changed, steps


def _rotated(weight: Tensor, cfg: ModelConfig, rotated: Rotated, rotation: Rotation) -> Tensor:
    if rotated.part == "all":
        out = torch.empty_like(weight, memory_format=torch.contiguous_format)
        # Chunks along the side that is not rotated: rows for inputs, columns for outputs.
        source, target = stacked(weight), stacked(out)
        if rotated.side == "outputs":
            source, target = source.mT, target.mT
        for batch, rows in chunks(source, _ROWS):
            target[batch, rows] = rotation.apply(wide(source[batch, rows])).to(weight.dtype)
        return out
    w = wide(weight)
    match rotated.part:
        case "latent":
            w = torch.cat([rotation.apply_to_outputs(w[: rotation.size]), w[rotation.size :]])
        case "values":
            keys, values = w.unflatten(0, (cfg.num_attention_heads, -1)).split(
                [cfg.qk_nope_head_dim, cfg.v_head_dim], 1
            )
            w = torch.cat([keys, rotation.apply_to_outputs(values)], 1).flatten(0, 1)
        case "heads" | "halves":
            w = rotation.apply(w.unflatten(-1, (-1, rotation.size))).flatten(-2)
        case _:
            raise AssertionError(f"{rotated=}")
    return w.to(weight.dtype).contiguous()


@dataclass(frozen=True)
class MtpCorrections:
    """Matrices for drafting after the residual stream was rotated. [D, D] ones multiply from the right: h <- h M.

    `hidden`: for the trunk's hidden state, before `draft`. msModelSlim exports it as `rot.weight`. `chained`: for the
    MTP layer's own output H', before a further `draft`. `head` [W, D]: replaces lm_head in the logits of H'. `to_head`:
    the equivalent matrix for H' before lm_head; None where the final norm's weight has a zero.
    """

    hidden: Tensor
    chained: Tensor
    head: Tensor
    to_head: Tensor | None


def mtp_corrections(rotation: Rotation, norm: Tensor, mtp_norm: Tensor, lm_head: Tensor) -> MtpCorrections:
    """For the residual `rotation` R: R^T diag(g) R, R^T diag(g_mtp) R, lm_head diag(g_mtp) R, R^T diag(g_mtp / g) R.

    `norm` is the weight g of model.norm, `mtp_norm` that of shared_head.norm, `lm_head` [W, D], all before folding.
    Matrices come in float32 (float64 for float64), the head in lm_head's dtype.
    """
    dtype = wide(norm[:0]).dtype
    matrix = rotation.matrix().to(norm.device)

    def in_rotated_basis(factor: Tensor) -> Tensor:
        return rotation.apply_to_outputs(factor.double()[:, None] * matrix).to(dtype)

    head = torch.empty_like(lm_head, memory_format=torch.contiguous_format)
    for _, rows in chunks(stacked(head)):
        head[rows] = rotation.apply(scale_inputs(wide(lm_head[rows]), mtp_norm)).to(head.dtype)
    ratio = None if bool((norm == 0).any()) else mtp_norm.double() / norm.double()
    return MtpCorrections(
        hidden=in_rotated_basis(norm),
        chained=in_rotated_basis(mtp_norm),
        head=head,
        to_head=None if ratio is None else in_rotated_basis(ratio),
    )
