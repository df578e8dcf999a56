"""Formats of quantized files, and which one a target gets.

own          glm5's layout              compressed   compressed-tensors: vLLM, SGLang, transformers
fp8          native FP8, w4afp8         modelopt     NVFP4: vLLM, SGLang
ascend       AscendV1                   packing      codes of four bits      targets   patterns of module names
"""

from glm5.common.errors import ConfigError
from glm5.quant.record import Scheme
from glm5.quantize.formats.ascend import AscendV1
from glm5.quantize.formats.base import Extras, Format, Matrix, scheme_name
from glm5.quantize.formats.compressed import CompressedTensors
from glm5.quantize.formats.fp8 import NativeFp8, W4aFp8, is_block
from glm5.quantize.formats.modelopt import ModelOpt
from glm5.quantize.formats.own import Own
from glm5.quantize.plan import Plan

__all__ = ["Extras", "Format", "Matrix", "choose", "scheme_name"]


def choose(plan: Plan) -> Format:
    """The format that a plan's target reads. ConfigError names the first module that it cannot hold."""
    held = {(module, linear.scheme) for linears in plan.linears.values() for module, linear in linears.items()}
    form = _form(plan, {scheme for _, scheme in held})
    for module, scheme in sorted(held, key=str):
        if why := form.refusal(module, scheme):
            raise ConfigError(f"--target {plan.target}: {module} as {scheme_name(scheme)}: {why}")
    return form


def _form(plan: Plan, schemes: set[Scheme]) -> Format:
    int4 = [scheme for scheme in schemes if (scheme.weight.kind, scheme.weight.bits) == ("int", 4)]
    if all(is_block(scheme) for scheme in schemes) and plan.target != "ascend":
        return NativeFp8()
    if plan.target == "glm5":
        return Own()
    if plan.target == "ascend":
        weight_only = all(scheme.act is None for scheme in schemes)
        return CompressedTensors("vllm-ascend") if weight_only else AscendV1()
    if any(scheme.weight.kind == "nvfp4" for scheme in schemes):
        return ModelOpt()
    if plan.target == "sglang" and any(scheme.act is not None for scheme in int4):
        return W4aFp8()
    return CompressedTensors(plan.target, e4m3_scales=any(scheme.act is not None for scheme in int4))
