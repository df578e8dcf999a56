"""What drafts need after the residual stream was rotated, and copies that some engines look for in the MTP layer.

The trunk's hidden state is then without the final norm's weight and in another basis, and the head that MTP shares has
that weight in it. Own files carry a head for the MTP layer and two matrices for hidden states (`MtpCorrections`):

    model.layers.N.shared_head.head.weight    model.layers.N.hidden_rotation.weight    .chained_rotation.weight

AscendV1 has a place for the head and, in rot.safetensors, for the first matrix; its engine rotates no chained state. It
computes drafts with the MTP layer's own copies of the head and the embedding, which its files always have.
"""

import torch
from torch import Tensor

from glm5.checkpoint.shard import read_tensor
from glm5.config.model import ModelConfig
from glm5.quant.rotate import mtp_corrections
from glm5.quantize.quantize_layer import Run, rotated
from glm5.quantize.source import Source

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def draft_tensors(source: Source, run: Run, layer_idx: int, cfg: ModelConfig) -> dict[str, Tensor]:
    """Further tensors of the MTP layer's files; none for other layers."""
    if layer_idx != cfg.num_hidden_layers:
        return {}
    mtp = f"model.layers.{layer_idx}."
    residual = run.rotations.get("residual")
    found: dict[str, Tensor] = {}
    if residual is not None:
        parts = [_read(source, name) for name in (NORM, f"{mtp}shared_head.norm.weight", HEAD)]
        norm, mtp_norm, head = (part.to(run.device) for part in parts)
        fixed = mtp_corrections(residual, norm.to(run.dtype), mtp_norm.to(run.dtype), head)
        found[f"{mtp}shared_head.head.weight"] = fixed.head.cpu()
        if run.plan.target == "glm5":
            found[f"{mtp}hidden_rotation.weight"] = fixed.hidden.float().cpu()
            found[f"{mtp}chained_rotation.weight"] = fixed.chained.float().cpu()
        else:
            found["rot.weight"] = fixed.hidden.float().cpu()
    if run.plan.target not in ("glm5", "gguf"):
        copies = {f"{mtp}embed_tokens.weight": EMBED, f"{mtp}shared_head.head.weight": HEAD}
        for copy, name in copies.items():
            needed = run.plan.target == "ascend" or residual is not None
            if copy not in found and (copy in source.index.entries or needed):
                stored = _read(source, name)
                found[copy] = rotated(run, {name: stored})[name].to(stored.dtype).cpu()
    return found


def _read(source: Source, name: str) -> Tensor:
    tensor = read_tensor(source.directory, source.index.entries[name])
    return tensor if tensor.is_floating_point() else tensor.to(torch.float32)
