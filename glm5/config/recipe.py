"""A quantization recipe: ordered steps. The keys are msModelSlim's; `recipe_file` reads files.

process   ordered steps: quarot, flex_awq_ssz, flex_smooth_quant, linear_quant; group holds several
include   patterns (fnmatch) on module names; exclude wins. {mtp} in one stands for the MTP layer's index
qconfig   grid and method of weights and of the activations that meet them
"""

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from glm5.config.refusal import Refused

Subgraph = Literal["norm-linear", "ov", "up-down"]
Method = Literal["minmax", "ssz", "gptq"]
SUBGRAPHS: tuple[Subgraph, ...] = ("norm-linear", "ov", "up-down")
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all parts of a recipe: frozen, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class WeightExt(Section):
    """Parameters of a method."""

    step: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """ssz: alternations of scale and codes; here at most so many, from the best start."""
    group_size: Annotated[int, Field(ge=1)] | None = None
    """per_group: weights that share a scale. Default 128, of nvfp4 16."""
    weighted: bool = False
    """ssz: errors are weighted by activations."""
    scales: Literal["minmax", "ssz"] = "ssz"
    """gptq: where its scales come from."""
    damp: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """gptq: share of the Hessian's mean diagonal that is added to it."""


class WeightGrid(Section):
    """The grid of a weight, and the method that chooses its values."""

    scope: Literal["per_channel", "per_group", "per_block"]
    dtype: Literal["int8", "int4", "fp8_e4m3", "nvfp4"]
    symmetric: bool = True
    method: Method = "minmax"
    ext: WeightExt = WeightExt()

    @model_validator(mode="after")
    def _known(self) -> Self:
        scopes = {
            "int8": ("per_channel", "per_group"),
            "int4": ("per_channel", "per_group"),
            "fp8_e4m3": ("per_channel", "per_block"),
            "nvfp4": ("per_group",),
        }[self.dtype]
        if self.scope not in scopes:
            raise ValueError(f"weights of {self.dtype} are {' or '.join(scopes)}, got {self.scope}")
        if self.method == "ssz" and self.dtype not in ("int4", "int8"):
            raise ValueError("ssz is for int4 and int8 weights")
        if self.method == "gptq" and (self.dtype not in ("int4", "int8") or not self.symmetric):
            raise ValueError("gptq is for symmetric int4 and int8 weights")
        if not self.symmetric and self.dtype in ("fp8_e4m3", "nvfp4"):
            raise ValueError(f"weights of {self.dtype} are symmetric")
        by_ssz = self.method == "ssz" or (self.method == "gptq" and self.ext.scales == "ssz")
        acting = {"group_size": self.scope == "per_group", "step": by_ssz, "weighted": by_ssz}
        for name in sorted(self.ext.model_fields_set):
            value = getattr(self.ext, name)
            if value is not None and not acting.get(name, self.method == "gptq"):
                raise Refused(f"ext.{name}", value, f"nothing: it has no effect on {self.method} {self.scope}")
        return self


class ActGrid(Section):
    """Which values activations take at run time; dtype float leaves them as they are."""

    scope: Literal["per_token", "per_group", "per_tensor"] = "per_token"
    dtype: Literal["int8", "fp8_e4m3", "float"]
    symmetric: bool = True
    method: Literal["minmax", "none"] = "minmax"
    ext: dict[str, Any] = {}

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.ext:
            raise ValueError(f"act.ext: got {self.ext}, nothing is known there")
        if self.scope == "per_tensor" and self.dtype != "float":
            raise ValueError("act: per_tensor (static scales) is not written; per_token is found at run time")
        if self.dtype != "float" and not self.symmetric:
            raise ValueError("act: only symmetric activations are written")
        return self


class QConfig(Section):
    """One way to compute a linear layer."""

    act: ActGrid = ActGrid(dtype="float")
    weight: WeightGrid


class Filter(Section):
    """The modules of a step."""

    include: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    exclude: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Whether some include and no exclude fits the module name."""
        return any(fnmatchcase(name, p) for p in self.include) and not any(fnmatchcase(name, p) for p in self.exclude)


class QuaRot(Section):
    """Fold the norms' weights into what follows them, then rotate."""

    type: Literal["quarot"]
    residual: bool = True
    """The stream between layers. Under it the MTP layer needs corrections."""
    latents: bool = True
    """Query and key-value latents."""
    heads: bool = True
    """Values of each head."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Of the random signs. Default: the run's."""
    export_extra_info: Literal[True] = True
    """Of msModelSlim's files: matrices for drafts are written wherever the target has a place for them."""
    online: Literal[False] = False
    block_size: Literal[-1] = -1
    max_tp_size: Literal[4] = 4
    """Of rotations at run time, which are not made."""
    down_proj_online_layers: tuple[()] = ()


class FlexSmooth(Filter):
    """Move outliers of activations into weights; exponents searched unless given."""

    type: Literal["flex_smooth_quant"]
    alpha: Share | None = None
    beta: Share | None = None
    enable_subgraph_type: Annotated[tuple[Subgraph, ...], Field(min_length=1)] = SUBGRAPHS


class FlexAwq(Filter):
    """The same with the real quantizer in the search, and the weights left out of the scale."""

    type: Literal["flex_awq_ssz"]
    alpha: Share | None = None
    beta: Literal[0] = 0
    qconfig: QConfig
    """How the search rounds: by minmax, or by ssz."""
    enable_subgraph_type: Annotated[tuple[Subgraph, ...], Field(min_length=1)] = SUBGRAPHS

    @model_validator(mode="after")
    def _searches(self) -> Self:
        weight = self.qconfig.weight
        if weight.method == "gptq" or weight.ext.weighted or (weight.method == "ssz" and weight.dtype != "int4"):
            raise ValueError("a search rounds by minmax, or int4 by ssz without weighted errors")
        return self


class LinearQuant(Filter):
    """Quantize linear layers. Of several steps that take a module, the last one counts."""

    type: Literal["linear_quant"]
    qconfig: QConfig


Step = Annotated[QuaRot | FlexSmooth | FlexAwq | LinearQuant, Field(discriminator="type")]


class Recipe(Section):
    """All steps, in order."""

    process: tuple[Step, ...] = Field(min_length=1)
    dataset: str | None = None
    """Calibration text: a file, looked for beside the recipe."""
    save: Literal["ascend", "vllm"] | None = None
    """The target, where a file names one."""
    max_shard_gb: Annotated[float, Field(gt=0, le=2e6)] = 4.0
    """Largest file of weights."""
    notes: tuple[str, ...] = ()
    """Printed before a run."""

    @property
    def rotation(self) -> QuaRot | None:
        return next((step for step in self.process if isinstance(step, QuaRot)), None)

    @property
    def smoothing(self) -> tuple[FlexSmooth | FlexAwq, ...]:
        return tuple(step for step in self.process if isinstance(step, FlexSmooth | FlexAwq))

    @property
    def linears(self) -> tuple[LinearQuant, ...]:
        return tuple(step for step in self.process if isinstance(step, LinearQuant))

    @property
    def needs_text(self) -> bool:
        """Whether some step needs calibration activations."""
        weights = [step.qconfig.weight for step in self.linears]
        return bool(self.smoothing) or any(weight.method == "gptq" or weight.ext.weighted for weight in weights)

    @property
    def is_plain(self) -> bool:
        """Only min-max, nothing folded, rotated or smoothed."""
        plain = all(step.qconfig.weight.method == "minmax" for step in self.linears)
        return plain and self.rotation is None and not self.smoothing

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        kinds = [step.type for step in self.process]
        if kinds.count("quarot") > 1:
            raise ValueError("quarot stands twice")
        if "quarot" in kinds and kinds[0] != "quarot":
            raise ValueError("quarot comes first: what was smoothed before would be undone")
        order = [kind == "linear_quant" for kind in kinds]
        if order != sorted(order):
            raise ValueError("linear_quant comes after rotation and smoothing")
        if not any(order):
            raise ValueError("no linear_quant: nothing would be quantized")
        return self
