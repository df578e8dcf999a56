"""Random weights of the real shapes, made on the target device, for speed measurements.

Speed does not depend on values as long as they are finite. Activations stay at unit scale, so that FP8 neither
overflows nor rounds to zero, and router logits have a standard deviation of 1, so that experts are used evenly. FP8
weights are uniform over e4m3 codes; their block scales are 0.5 to 1.5 times the scale that gives unit variance.

Replicated tensors are drawn from the same seed on every rank, sharded ones from a seed of each rank.
"""

import torch
from torch import Tensor

from glm5.checkpoint.dtypes import dtype_name
from glm5.checkpoint.formats import format_of, stored_of
from glm5.checkpoint.formats.fp8 import NativeFp8, fp8_config
from glm5.checkpoint.init import E4M3_RMS, seed_of
from glm5.checkpoint.load import empty_model
from glm5.checkpoint.stored import MODEL_SCALE_SUFFIX, check_groups, weight_formats
from glm5.config.model import ModelConfig
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import FP8
from glm5.model.glm5 import Glm5
from glm5.parallel.table import UNSHARDED, Shard, local_config

_RMS = {FP8: E4M3_RMS, torch.int8: 74.0, torch.uint8: 4.0}  # of uniform codes; uint8 holds two codes of 4 bits
_CHUNK = 1 << 28  # elements filled at a time


def dummy(
    cfg: ModelConfig,
    *,
    fp8: bool,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
    shard: Shard = UNSHARDED,
) -> Glm5:
    """A model of `cfg` with random weights, in eval mode; the same for the same seed.

    `fp8`: weights are quantized as the config says, or else in FP8 where published FP8 checkpoints are. `shard`: the
    part of one tensor-parallel rank.
    """
    stored = stored_of(cfg) if fp8 else {}
    has_blocks = fp8 and isinstance(format_of(cfg) or NativeFp8(), NativeFp8)
    specs = tensor_specs(cfg) if has_blocks else ()
    kept = frozenset(spec.name for spec in specs if spec.fp8 and spec.name not in stored)
    native = fp8_config(spec.name for spec in specs if not spec.fp8) if has_blocks else None
    quantization = cfg.quantization_config if stored else native
    cfg = cfg.replace(quantization_config=quantization, dtype=dtype_name(dtype))
    check_groups(stored.values(), shard.size)
    formats = weight_formats(stored, cfg, torch.device(device))
    model = empty_model(local_config(cfg, shard.size), kept, dtype, torch.device(device), formats, num_ranks=shard.size)
    model.cfg = cfg
    unsharded = empty_model(cfg, kept, dtype, torch.device("meta"), formats).state_dict()
    generator = torch.Generator(device)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            shape = unsharded[name].shape
            suffix = "" if shape == tensor.shape else f":{shard.rank}"
            generator.manual_seed(seed_of(seed, f"{name}{suffix}"))
            codes = unsharded.get(name.removesuffix(MODEL_SCALE_SUFFIX))
            if codes is not None and name.endswith(MODEL_SCALE_SUFFIX):
                _fill_scales(tensor, codes, generator)
            else:
                _fill(name, tensor, shape[-1], generator)
    return model.eval()


def _fill_scales(tensor: Tensor, codes: Tensor, generator: torch.Generator) -> None:
    """Scales for the rows of `codes`, which are uniform over the codes of their dtype."""
    num_inputs = codes.shape[-1] * (2 if codes.dtype == torch.uint8 else 1)
    tensor.uniform_(0.5, 1.5, generator=generator).div_(_RMS[codes.dtype] * num_inputs**0.5)


def _fill(name: str, tensor: Tensor, width: int, generator: torch.Generator) -> None:
    """`width`: the last dimension of the unsharded tensor."""
    if name.endswith("norm.weight"):
        tensor.fill_(1.0)
    elif name.endswith(("norm.bias", "e_score_correction_bias")):
        tensor.zero_()
    elif name.endswith("_scale_inv"):
        # The weight's width from the number of blocks; slightly too large where the last block is ragged.
        num_inputs = width * 128
        tensor.uniform_(0.5, 1.5, generator=generator).div_(E4M3_RMS * num_inputs**0.5)
    elif tensor.dtype == FP8:
        for part in tensor.view(torch.uint8).view(-1).split(_CHUNK):
            part.random_(0, 256, generator=generator)
            part.masked_fill_((part & 0x7F) == 0x7F, 0)  # e4m3's two NaNs
    elif tensor.dtype in (torch.uint8, torch.int8):
        # The lowest code has no positive counterpart and is left out: a mean below 0 would grow from layer to layer
        # until all tokens are alike and choose the same experts.
        for part in tensor.view(torch.uint8).view(-1).split(_CHUNK):
            part.random_(0, 256, generator=generator)
            for mask, lowest in ((0x0F, 0x08), (0xF0, 0x80)) if tensor.dtype == torch.uint8 else ((0xFF, 0x80),):
                part.masked_fill_((part & mask) == lowest, 0)
    else:
        std = 1.0 if name.endswith("embed_tokens.weight") else width**-0.5
        for part in tensor.view(-1).split(_CHUNK):
            part.normal_(0.0, std, generator=generator)
