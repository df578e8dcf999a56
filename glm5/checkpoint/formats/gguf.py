"""GGUF: what llama.cpp loads. Codes go into Q4_0 or Q8_0, everything else stays float; see `checkpoint.gguf`.

    <module>.weight   uint8 [O, bytes of a row]: blocks of 32 values, each with its float16 scale

Scales are rounded to float16 before codes are computed, so that writing rounds nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from glm5.checkpoint.formats.base import Format, Schemes, Stored, StoredTensor, scheme_name
from glm5.checkpoint.gguf.blocks import BLOCK, MAX_SCALE, block_scale, pack, row_bytes, unpack
from glm5.checkpoint.gguf.metadata import check_config
from glm5.checkpoint.gguf.tensors import FLOATS, KV_B, architecture, join_kv_b, plain_type, split_kv_b
from glm5.checkpoint.gguf.vocabulary import check_vocabulary
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.quantize import Target
from glm5.config.tensors import tensor_specs
from glm5.quant.record import Quantized, Scheme

_DTYPES = {type_: dtype for dtype, type_ in FLOATS.items()}


@dataclass(frozen=True)
class Blocks(Stored):
    """A matrix whose codes and scales are one tensor."""

    def write(self, weight: Quantized) -> dict[str, Tensor]:
        return {self.name: pack(weight)}

    def read(self, fetch: Callable[[str], Tensor]) -> Quantized:
        return unpack(fetch(self.name), self.scheme.weight).check()


class Gguf(Format):
    """See the module's first lines. config.json carries no quantization_config."""

    name = "gguf"
    targets = ("gguf",)
    is_loaded = False

    def check(self, cfg: ModelConfig, directory: Path, schemes: Schemes) -> None:
        architecture()  # a missing package should be said before the work
        check_config(cfg)
        check_vocabulary(directory, cfg.vocab_size)
        columns = {spec.name: spec.shape[-1] for spec in tensor_specs(cfg)}
        for layer_idx, modules in schemes.items():
            for module in modules:
                name = f"model.layers.{layer_idx}.{module.replace('*', '0')}.weight"
                if columns[name] % BLOCK:
                    raise ConfigError(
                        f"--target gguf: rows of {columns[name]} of {name} do not divide into blocks of {BLOCK}; "
                        "allowed: a recipe that leaves it as it is"
                    )

    def refusal(self, module: str, scheme: Scheme, target: Target) -> str | None:
        grid = scheme.weight
        if module.endswith("kv_b_proj"):
            return "GGUF holds the keys' half transposed, so blocks would run across its rows; leave it unquantized"
        if grid.kind != "int" or grid.bits not in (4, 8) or not grid.symmetric:
            return f"GGUF's Q4_0 and Q8_0 hold symmetric int4 and int8, not {scheme_name(scheme)}"
        if grid.scope not in ("channel", "group") or (grid.group or BLOCK) % BLOCK:
            return f"GGUF has blocks of {BLOCK} in a row, so scales per channel or groups of a multiple of that"
        return None

    def stored_scale(self, scale: Tensor, scheme: Scheme) -> Tensor:
        if (largest := scale.max().item()) > MAX_SCALE:
            raise ConfigError(
                f"--target gguf: a scale of {largest:.3g} is beyond {MAX_SCALE:.0f}, the most that float16 holds; "
                "allowed: a recipe that leaves such weights as they are"
            )
        return block_scale(scale)

    def layout(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
        codes = StoredTensor(f"{module}.weight", ("U8",), (shape[0], row_bytes(shape[1], scheme.weight.bits)))
        return Blocks(module, scheme, shape, {"codes": codes})

    def write_plain(self, cfg: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name.endswith(KV_B):
            return split_kv_b(cfg, name, tensor)
        return {name: tensor.to(_DTYPES[plain_type(name, tensor.dtype, tensor.dim())])}

    def read_plain(self, name: str, fetch: Callable[[str], Tensor]) -> Tensor:
        return join_kv_b(name, fetch) if name.endswith(KV_B) else fetch(name)

    def config(self, cfg: ModelConfig, schemes: Schemes) -> None:
        return None
