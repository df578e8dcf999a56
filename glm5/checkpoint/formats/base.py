"""What a checkpoint format is: the schemes it holds, how config.json names them, and the tensors of a quantized matrix.

A format's `layout` of a matrix is what both sides share: `write` makes its tensors, `read` and the loader take them.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from glm5.checkpoint.formats.packing import UNPACKED, Packing
from glm5.checkpoint.shard import DTYPES, TensorEntry
from glm5.config.model import ModelConfig
from glm5.config.quantize import Target
from glm5.quant.record import Quantized, Scheme

Schemes = Mapping[int, Mapping[str, Scheme]]
"""By layer index and module of the layer; a stack of experts is one module, `mlp.experts.*.up_proj`."""
Role = Literal["codes", "scale", "offset", "tensor_scale"]
ON_DISK = {"int": "I8", "fp8": "F8_E4M3"}
"""Types of values of eight bits, by a grid's kind."""


class StoredTensor(NamedTuple):
    """One tensor of a quantized matrix: its name, the types it may have (the first is written), its shape."""

    name: str
    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    is_divisor: bool = False
    """It is stored as its reciprocal."""


@dataclass(frozen=True)
class Stored:
    """A quantized matrix [O, I] on disk. `module`: its name without `.weight`. `beside`: tensors that are written for
    other readers and not read here. `foreign`: such that only others write."""

    module: str
    scheme: Scheme
    shape: tuple[int, int]
    parts: dict[Role, StoredTensor]
    packing: Packing = UNPACKED
    beside: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the weight, as a plain checkpoint has it."""
        return f"{self.module}.weight"

    @property
    def tensor_names(self) -> list[str]:
        """Of all tensors on disk."""
        return [*(part.name for part in self.parts.values()), *self.beside, *self.foreign]

    def write(self, weight: Quantized) -> dict[str, Tensor]:
        """The tensors of `parts` by name."""
        found: dict[str, Tensor] = {}
        for role, part in self.parts.items():
            tensor, dtype = getattr(weight, role), DTYPES[part.dtypes[0]]
            tensor = tensor.reciprocal() if part.is_divisor else tensor
            stored = self.packing.pack(tensor).view(dtype) if role == "codes" else tensor.to(dtype)
            found[part.name] = stored.reshape(part.shape)
        return found

    def read(self, fetch: Callable[[str], Tensor]) -> Quantized:
        """What `write` was given; `fetch` has tensors by name."""
        parts = {
            role: fetch(part.name).float().reciprocal() if part.is_divisor else fetch(part.name)
            for role, part in self.parts.items()
        }
        codes = self.packing.unpack(parts.pop("codes"), signed=self.scheme.weight.kind == "int")
        if "tensor_scale" in parts:
            parts["tensor_scale"] = parts["tensor_scale"].reshape(1, 1)
        return Quantized(self.scheme.weight, codes, **{role: part.float() for role, part in parts.items()}).check()


@dataclass(frozen=True)
class Matrix:
    """One quantized matrix [O, I] on its way to a file. `module`: its name on disk without `.weight`."""

    module: str
    weight: Quantized
    scheme: Scheme
    input_amax: float | None = None
    """Largest calibration input, for formats with static scales; None where nothing was calibrated."""


class Format:
    """A way to store quantized matrices. Others keep their names and values, unless `write_plain` says otherwise."""

    name: ClassVar[str]
    """The `quant_method` of config.json."""
    targets: ClassVar[tuple[Target, ...]]
    """Who loads what is written in it."""
    is_loaded: ClassVar[bool] = True
    """Whether this engine loads it."""
    shard_prefix: ClassVar[str] = "model"
    """Of the files of weights."""

    def supports(self, schemes: Set[Scheme]) -> bool:
        """Whether a plan with these schemes is written in this format, for a target that loads it."""
        return True

    def refusal(self, module: str, scheme: Scheme, target: Target) -> str | None:
        """Why this format cannot hold a scheme for a module of a layer, or its target not load it; None if both can."""
        return None

    def check(self, cfg: ModelConfig, directory: Path, schemes: Schemes) -> None:
        """Raise ConfigError for a model, or a tokenizer in its folder, that this format has no place for."""

    def stored_scale(self, scale: Tensor, scheme: Scheme) -> Tensor:
        """The scale as its reader will use it: values are rounded for this one (float32 in and out)."""
        return scale

    def stored_tensor_scale(self, scale: Tensor) -> Tensor:
        """The same of nvfp4's scale of a whole tensor."""
        return scale

    def layout(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
        """The tensors of a matrix [O, I]. Raises ConfigError for one that the format does not hold."""
        raise NotImplementedError

    def beside(self, matrix: Matrix) -> dict[str, Tensor]:
        """The tensors that `layout` names as `beside`."""
        return {}

    def write(self, matrix: Matrix) -> dict[str, Tensor]:
        """All tensors of a matrix, by name on disk."""
        rows, columns = matrix.weight.codes.shape
        stored, beside = self.layout(matrix.module, matrix.scheme, (rows, columns)), self.beside(matrix)
        assert tuple(beside) == stored.beside, f"{self.name=} {stored.beside=}"
        return stored.write(matrix.weight) | beside

    def write_plain(self, cfg: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors, by name, as which the format stores one that is not quantized."""
        return {name: tensor}

    def read_plain(self, name: str, fetch: Callable[[str], Tensor]) -> Tensor:
        """The value of what `write_plain` was given; `fetch` has tensors by name."""
        return fetch(name)

    def config(self, cfg: ModelConfig, schemes: Schemes) -> dict[str, Any] | None:
        """`quantization_config` of config.json; None for none."""
        raise NotImplementedError

    def schemes(
        self, config: Mapping[str, Any], modules: list[str], entries: Mapping[str, TensorEntry]
    ) -> dict[str, Scheme]:
        """What `config` says of `modules` on disk (`model.layers.3.mlp.experts.7.up_proj`), without those that are not
        quantized. `entries`: the tensors found, where any are known. Raises ConfigError for what it gets wrong."""
        raise NotImplementedError

    def files(self, cfg: ModelConfig, schemes: Schemes, stored: Mapping[str, str]) -> dict[str, Any]:
        """Further files: JSON by name. `stored`: all tensors on disk, with the module's scheme by name ("" for plain
        ones)."""
        return {}


def scheme_name(scheme: Scheme) -> str:
    """A short name: w8a8, w4a8, w4a8-g128-fp8, w4a16-g128, fp8-block, nvfp4..."""
    weight, act = scheme.weight, scheme.act
    if weight.kind == "nvfp4":
        return "nvfp4"
    if weight.kind == "fp8":
        return "fp8-block" if weight.scope == "block" else "fp8"
    name = f"w{weight.bits}a{8 if act else 16}"
    name += f"-g{weight.group}" if weight.scope == "group" else ""
    name += "-fp8" if act and act.kind == "fp8" else ""
    return name if weight.symmetric else f"{name}-asymmetric"


def exact_bf16(scale: Tensor) -> Tensor:
    """Scales that a bfloat16 file holds without loss, never 0."""
    return scale.to(torch.bfloat16).to(scale.dtype).clamp_min(torch.finfo(torch.bfloat16).tiny)
