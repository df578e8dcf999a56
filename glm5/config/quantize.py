"""`glm5 quantize`, `glm5 quant` and `glm5 convert`: their settings."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from glm5.config.command import Also, Command, NoEffect, Positional
from glm5.config.refusal import refuse

SchemeName = Literal["w8a8", "w4a8", "w4a16", "fp8", "nvfp4", "nvfp4-fp8"]
Target = Literal["glm5", "vllm", "sglang", "ascend", "gguf"]
_DEVICES = r"auto|cpu|cuda(:\d{1,3})?(,cuda:\d{1,3})*"


class QuantizeConfig(Command):
    """Quantize a BF16 or FP8 checkpoint, layer by layer. The same command goes on where a run was cut off."""

    model: Annotated[str, Positional()]
    """Checkpoint folder, or a Hugging Face id such as zai-org/GLM-5-FP8."""
    out: Annotated[str | None, Positional()] = None
    """Folder to write; it appears when all is done. With --analyze: folder for the analysis."""
    scheme: SchemeName | None = None
    """Bits of weights and activations. Default: w4a8 (attention and dense MLPs w8a8, experts w4a8); for gguf w4a16."""
    recipe: str | None = None
    """A file in place of a scheme: TOML, or msModelSlim's YAML."""
    target: Target | None = None
    """Who loads the result, which decides the files; gguf: llama.cpp. Default: glm5, or what the recipe names."""
    w4a8_weights: Literal["channel", "group"] | None = None
    """w4a8: int4 per channel under int8 tokens, or in groups of 128 under e4m3 tokens. Default: the target's."""
    method: Literal["minmax", "ssz", "gptq"] | None = None
    """How 4-bit weights are found. minmax alone, without rotation and smoothing, suits a QAT checkpoint. Default: the
    recipe's."""
    upstream_faithful: bool = False
    """Search and round as msModelSlim does, its known faults included; for comparisons."""
    mtp: Literal["keep", "drop"] = "keep"
    """The MTP layer under rotation. keep: corrected, or, where the target has no place for that (vllm, sglang,
    gguf), the residual stream is not rotated. drop: rotated all the same, and the MTP layer left out."""
    calibration: str = "generated"
    """Text to calibrate on: a file (.txt, .jsonl or .json), or generated."""
    num_samples: Annotated[int, Field(ge=1, le=10**5)] = 48
    """Calibration samples."""
    sample_len: Annotated[int, Field(ge=8)] = 2048
    """Longest sample in tokens."""
    calibrate_all_experts: bool = False
    """Show every token to every expert while statistics are gathered."""
    min_tokens: Annotated[int, Field(ge=1)] = 16
    """An expert that saw fewer calibration tokens is named, and treated by methods that need none."""
    seed: Annotated[int, Field(ge=0, le=10**12)] = 0
    """Of rotation and choice of samples."""
    device: Annotated[str, Field(pattern=f"^({_DEVICES})$")] = "auto"
    """auto (all GPUs, else the CPU), cpu, cuda:0, or several as cuda:0,cuda:1, which share experts."""
    compute_dtype: Literal["float32", "float64"] = "float32"
    """Element type of weights and activations while they are worked on."""
    max_shard_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Largest file of weights. Default: the recipe's, or 4. A GGUF is one file."""
    held_out: str = "generated"
    """Text that the report measures on: a file, or generated."""
    held_out_tokens: Annotated[int, Field(ge=0, le=10**8)] = 8192
    """Tokens of it. 0: no measurement, only the verification of the files."""
    analyze: bool = False
    """Write no checkpoint: measure each layer and module at each width, and propose a fallback list."""
    budget: Annotated[float, Field(gt=0, lt=16)] | None = None
    """With --analyze: bits a weight that the proposal may take on average. Default: half a bit above the scheme's."""
    restart: bool = False
    """Throw away what a run that was cut off has left, and begin anew."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.scheme is not None and self.recipe is not None:
            raise ValueError("either --scheme or --recipe; got both")
        if self.out is None:
            raise ValueError("OUT: the folder to write must be given")
        if self.w4a8_weights is not None and self.scheme not in (None, "w4a8"):
            raise ValueError(f"--w4a8-weights is for --scheme w4a8, got --scheme {self.scheme}")
        return self


_UPSTREAM_TAGS = {"vllm_ascend", "sglang", "mindie", "atlas_a2_inference", "atlas_a3_inference"}
_NPU = re.compile(r"npu(:\d+(,\d+)*)?")


class QuantConfig(Command):
    """Quantize with msModelSlim's command line. For what it cannot say, see `glm5 quantize`."""

    model_path: Annotated[str, Also("--model_path")]
    """Checkpoint folder, or a Hugging Face id."""
    save_path: Annotated[str, Also("--save_path")]
    """Folder to write."""
    model_type: Annotated[Literal["GLM-5", "GLM-5.1", "GLM-5.2", "GLM-5.3"], Also("--model_type")] = "GLM-5"
    """The architecture; all of these are one here."""
    quant_type: Annotated[Literal["w4a8", "w8a8", "w4a16"] | None, Also("--quant_type")] = None
    """The scheme."""
    config_path: Annotated[str | None, Also("--config_path")] = None
    """A recipe in place of a scheme."""
    device: str = "auto"
    """cpu, cuda:N or auto. npu is understood as auto."""
    tag: tuple[str, ...] = ()
    """Engine and hardware, which choose among msModelSlim's recipes: there is one a scheme here."""
    debug: Annotated[bool, NoEffect("--log-level debug says more")] = False
    trust_remote_code: Annotated[
        Literal["True", "False"] | None, Also("--trust_remote_code"), NoEffect("no code of a checkpoint is ever run")
    ] = None

    @model_validator(mode="after")
    def _one_recipe(self) -> Self:
        if (self.quant_type is None) == (self.config_path is None):
            got = "neither" if self.quant_type is None else "both"
            raise ValueError(f"either --quant_type or --config_path; got {got}")
        if unknown := [tag for tag in self.tag if tag.lower() not in _UPSTREAM_TAGS]:
            raise ValueError(f"tag {unknown[0]} is not known; known are {', '.join(sorted(_UPSTREAM_TAGS))}")
        if not re.fullmatch(rf"{_NPU.pattern}|{_DEVICES}", self.device):
            raise ValueError(f"--device auto, cpu, cuda:N or npu; got {self.device!r:.60}")
        return self

    def settings(self) -> QuantizeConfig:
        """The same run in `glm5 quantize`'s words; the target is Ascend's, as it is there, or what a recipe names."""
        device = "auto" if _NPU.fullmatch(self.device) else self.device
        return QuantizeConfig(
            model=self.model_path,
            out=self.save_path,
            scheme=self.quant_type,
            recipe=self.config_path,
            target="ascend" if self.config_path is None else None,
            device=device,
        )


class ConvertConfig(Command):
    """Convert a checkpoint between FP8 and BF16, tensor by tensor."""

    model: Annotated[str, Positional()]
    """Checkpoint folder, or a Hugging Face id."""
    out: Annotated[str, Positional()]
    """Folder to write. One that holds weights, or what belongs to no checkpoint, is refused."""
    overwrite: bool = False
    """Replace weights that are there."""
    dtype: Literal["bfloat16", "fp8", "float16", "float32"]
    """What to write. fp8: in blocks of 128x128, what published FP8 checkpoints quantize; the rest bfloat16."""
    max_shard_gb: Annotated[float, Field(gt=0, le=1e6)] = 5.0
    """Largest file of weights."""


class LadderConfig(Command):
    """Methods of quantization side by side, each with what comes before it, on models of `glm5 demo`: KL, perplexity
    and top-1 on held-out text, accuracy on held-out questions. The same command goes on where it was cut off."""

    models: Annotated[tuple[str, ...], Positional(), Field(min_length=1)]
    """Checkpoint folders, such as runs/demo/model; several are told apart by their order."""
    out: str = "runs/ladder"
    """Folder for results: ladder.jsonl, ladder.json and ladder.html."""
    kinds: tuple[Literal["channel", "group"], ...] = ("channel", "group")
    """int4 per channel under int8 tokens, groups of 128 under e4m3 tokens."""
    rungs: tuple[str, ...] = ()
    """Rungs to run, by name. Default: all."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of calibration samples and rotation; methods that use neither run once."""
    num_questions: Annotated[int, Field(ge=10)] = 4000
    """Held-out questions, of all kinds in turn."""
    num_tokens: Annotated[int, Field(ge=100)] = 65536
    """Held-out tokens for KL, perplexity and top-1, at least; of the same questions."""
    num_samples: Annotated[int, Field(ge=1)] = 256
    """Calibration samples: conversations of training."""
    outliers: Annotated[float, Field(gt=1)] | None = None
    """First make channels of activations that much larger, and the weights that read them smaller: the same model,
    harder to quantize."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    """auto, cpu or cuda:N."""


def check_out(out: str) -> Path:
    """The folder to write, which must not be there yet, or be empty."""
    path = Path(out).expanduser().resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise refuse("OUT", out, "a folder that is not there yet, or is empty; move it away or choose another")
    return path
