"""ModelOpt's NVFP4: scales are multipliers.

weight uint8 [O, I / 2], even input in the low half     weight_scale e4m3 [O, I / 16]
weight_scale_2 float32 = largest weight / (6 * 448)     input_scale float32 = largest input / (6 * 448)
"""

from collections.abc import Mapping, Set
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from glm5.checkpoint.formats.base import Format, Matrix, Role, Schemes, Stored, StoredTensor, scheme_name
from glm5.checkpoint.formats.packing import PAIRS
from glm5.checkpoint.formats.patterns import ignored_globs
from glm5.checkpoint.shard import TensorEntry
from glm5.config.model import ModelConfig
from glm5.config.quantize import Target
from glm5.config.refusal import refuse
from glm5.kernels.block_scaled import FP8_MAX
from glm5.quant.record import E2M1, NVFP4, Scheme

_SHARED = {"quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": None}


class ModelOpt(Format):
    """What nvidia's NVFP4 checkpoints are. vLLM and SGLang load it on Hopper with 16-bit activations, as this engine
    does: Hopper has no product of FP4 inputs."""

    name = "modelopt"
    targets = ("vllm", "sglang")

    def supports(self, schemes: Set[Scheme]) -> bool:
        return all(scheme.weight.kind == "nvfp4" for scheme in schemes)

    def refusal(self, module: str, scheme: Scheme, target: Target) -> str | None:
        return None if scheme.weight.kind == "nvfp4" else f"ModelOpt's NVFP4 holds no {scheme_name(scheme)}"

    def layout(self, module: str, scheme: Scheme, shape: tuple[int, int]) -> Stored:
        parts: dict[Role, StoredTensor] = {
            "codes": StoredTensor(f"{module}.weight", ("U8",), (shape[0], shape[1] // 2)),
            "scale": StoredTensor(f"{module}.weight_scale", ("F8_E4M3",), scheme.weight.scale_shape(shape)),
            "tensor_scale": StoredTensor(f"{module}.weight_scale_2", ("F32",), ()),
        }
        return Stored(module, scheme, shape, parts, PAIRS, (f"{module}.input_scale",))

    def beside(self, matrix: Matrix) -> dict[str, Tensor]:
        reach = E2M1[-1] * FP8_MAX
        return {f"{matrix.module}.input_scale": torch.tensor((matrix.input_amax or reach) / reach)}

    def config(self, cfg: ModelConfig, schemes: Schemes) -> dict[str, Any]:
        return {"quant_method": self.name, **_SHARED, "ignore": ignored_globs(cfg, schemes)}

    def schemes(
        self, config: Mapping[str, Any], modules: list[str], entries: Mapping[str, TensorEntry]
    ) -> dict[str, Scheme]:
        for key, allowed in (("quant_algo", "NVFP4"), ("group_size", 16)):
            if config.get(key, 16 if key == "group_size" else None) != allowed:
                raise refuse(f"quantization_config.{key}", config.get(key), str(allowed))
        ignored = config.get("ignore") or config.get("exclude_modules") or []
        return {name: NVFP4 for name in modules if not any(fnmatchcase(name, pattern) for pattern in ignored)}

    def files(self, cfg: ModelConfig, schemes: Schemes, stored: Mapping[str, str]) -> dict[str, Any]:
        quantization = {**_SHARED, "exclude_modules": ignored_globs(cfg, schemes)}
        return {"hf_quant_config.json": {"producer": {"name": self.name}, "quantization": quantization}}
