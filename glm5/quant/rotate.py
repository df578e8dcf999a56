"""QuaRot for MLA, DSA and MoE: norms folded into the matrices behind them, then everything seen in rotated bases.

    fold      norm(x) diag(g) W^T = norm(x) (W diag(g))^T                  the norm's weight is then 1
    turn      inputs: W <- W R        outputs: W <- R^T W                  norm(x R) = norm(x) R once g = 1

The network stays what it was, with other numbers: logits, router and indexer see the same products. Nothing is left to
do at run time, but for drafts (`mtp_corrections`): the MTP layer shares the head, and reads the trunk's last hidden
state, with the weight of the final norm in neither place any more.
Source: QuaRot (arXiv 2404.00456); msModelSlim `model/glm_5/quarot.py` for which sides of what. graph.py is the table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.quant.chunks import chunks, stacked, wide
from glm5.quant.graph import ROTATIONS, Part, Rotated, RotationName, Side, place
from glm5.quant.hadamard import Rotation, random_hadamard, shifted_blocks
from glm5.quant.record import Step

Steps = dict[str, list[Step]]

_ROWS = 64  # rotated at a time, at least: additions run along them


def rotations(
    cfg: ModelConfig, names: Iterable[RotationName], seed: int = 1234, *, upstream: bool = False
) -> dict[RotationName, Rotation]:
    """Random rotations of the sizes of `cfg`. `upstream`: msModelSlim's kind for the q latent, which is not random."""
    made: dict[RotationName, Rotation] = {}
    for idx, (name, facts) in enumerate(ROTATIONS.items()):
        size = getattr(cfg, facts.size)
        if name in set(names):
            random = random_hadamard(size, seed + idx)
            made[name] = shifted_blocks(size) if upstream and name == "q latent" else random
    return made


def fold(tensors: Mapping[str, Tensor], names: Iterable[RotationName]) -> tuple[dict[str, Tensor], Steps]:
    """What of `tensors` changes when the norms that the named rotations need become 1, and a line for each change.

    `tensors` has whole layers (norms together with what they fold into), and `model.norm` together with `lm_head`.
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
    """weight [..., O, I] with inputs multiplied by factor [..., I], or [I / 2] for a half; one rounding."""
    factor = wide(factor).unsqueeze(-2)
    if part == "all":
        return (wide(weight) * factor).to(weight.dtype)
    first, second = wide(weight).chunk(2, -1)
    halves = (first * factor, second) if part == "first half" else (first, second * factor)
    return torch.cat(halves, -1).to(weight.dtype)


def rotate(
    tensors: Mapping[str, Tensor], cfg: ModelConfig, by: Mapping[RotationName, Rotation]
) -> tuple[dict[str, Tensor], Steps]:
    """What of `tensors` changes under the rotations, and a line for each change; ConfigError for a norm that is not 1.

    Tensors may be any part of the model. Turned in float32 (float64 for float64), then rounded to their own dtype.
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
        # Along the side that is not rotated parts are independent: rows for inputs, columns for outputs.
        of, into = stacked(weight), stacked(out)
        if rotated.side == "outputs":
            of, into = of.mT, into.mT
        for some, rows in chunks(of, _ROWS):
            into[some, rows] = rotation.apply(wide(of[some, rows])).to(weight.dtype)
        return out
    w = wide(weight)
    match rotated.part:
        case "latent":
            w = torch.cat([_turn_side(w[: rotation.size], "outputs", rotation), w[rotation.size :]])
        case "values":
            keys, values = w.unflatten(0, (cfg.num_attention_heads, -1)).split(
                [cfg.qk_nope_head_dim, cfg.v_head_dim], 1
            )
            w = torch.cat([keys, _turn_side(values, "outputs", rotation)], 1).flatten(0, 1)
        case "heads" | "halves":
            w = rotation.apply(w.unflatten(-1, (-1, rotation.size))).flatten(-2)
        case _:
            raise AssertionError(f"{rotated=}")
    return w.to(weight.dtype).contiguous()


def _turn_side(w: Tensor, side: Side, rotation: Rotation) -> Tensor:
    return rotation.apply(w) if side == "inputs" else rotation.apply_to_outputs(w)


@dataclass(frozen=True)
class MtpCorrections:
    """What drafts need after the residual stream was rotated. Matrices [D, D] multiply from the right: h <- h M.

    `hidden`: the trunk's hidden state, before `draft`. `chained`: the MTP layer's own H', before a further `draft`.
    `head` [W, D]: stands for lm_head in the logits of H'. `to_head`: the same as a matrix for H', before lm_head; None
    where the final norm's weight has a zero. `hidden` is what msModelSlim exports as `rot.weight`.
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
    turn = rotation.matrix().to(norm.device)

    def seen_from_there(factor: Tensor) -> Tensor:
        return rotation.apply_to_outputs(factor.double()[:, None] * turn).to(dtype)

    head = torch.empty_like(lm_head, memory_format=torch.contiguous_format)
    for _, rows in chunks(stacked(head)):
        head[rows] = rotation.apply(scale_inputs(wide(lm_head[rows]), mtp_norm)).to(head.dtype)
    ratio = None if bool((norm == 0).any()) else mtp_norm.double() / norm.double()
    return MtpCorrections(
        hidden=seen_from_there(norm),
        chained=seen_from_there(mtp_norm),
        head=head,
        to_head=None if ratio is None else seen_from_there(ratio),
    )
