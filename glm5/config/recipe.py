"""A quantization recipe: ordered steps, from TOML or msModelSlim's YAML, whose keys these are.

    process   ordered steps: quarot, flex_awq_ssz, flex_smooth_quant, linear_quant; group holds several
    include   patterns (fnmatch) on module names; exclude wins. {mtp} in one stands for the MTP layer's index
    qconfig   grid and method of weights and of the activations that meet them

msModelSlim's files have the same under `spec`; their other keys label recipes and have no effect.
"""

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glm5.common.errors import ConfigError
from glm5.config.refusal import complaint, first_error, refuse

Subgraph = Literal["norm-linear", "linear-linear", "ov", "up-down"]
Method = Literal["minmax", "ssz", "gptq"]
SUBGRAPHS: tuple[Subgraph, ...] = ("norm-linear", "linear-linear", "ov", "up-down")
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base of all parts of a recipe: frozen, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class WeightExt(Section):
    """Parameters of a method."""

    step: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """ssz as in msModelSlim: alternations of scale and codes."""
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

    include: tuple[str, ...] = ("*",)
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
    export_extra_info: bool = False
    """Of msModelSlim's files: matrices for MTP are written wherever the target has a place for them."""
    online: Literal[False] = False
    block_size: Literal[-1] = -1
    max_tp_size: Annotated[int, Field(ge=1)] = 4
    down_proj_online_layers: tuple[()] = ()


class FlexSmooth(Filter):
    """Move outliers of activations into weights; exponents searched unless given."""

    type: Literal["flex_smooth_quant"]
    alpha: Share | None = None
    beta: Share | None = None
    enable_subgraph_type: tuple[Subgraph, ...] = SUBGRAPHS


class FlexAwq(Filter):
    """The same with the real quantizer in the search, and the weights left out of the scale."""

    type: Literal["flex_awq_ssz"]
    alpha: Share | None = None
    beta: Literal[0] = 0
    qconfig: QConfig
    enable_subgraph_type: tuple[Subgraph, ...] = SUBGRAPHS


class LinearQuant(Filter):
    """Quantize linear layers. Of several steps that take a module, the last one counts."""

    type: Literal["linear_quant"]
    qconfig: QConfig


Step = Annotated[QuaRot | FlexSmooth | FlexAwq | LinearQuant, Field(discriminator="type")]


class Recipe(Section):
    """All steps, in order; `save` is what a msModelSlim file says about its output."""

    process: tuple[Step, ...] = Field(min_length=1)
    dataset: str | None = None
    """Calibration text: a file, looked for beside the recipe."""
    save: Literal["ascend", "vllm"] | None = None
    """The target, where a file names one."""

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


_SAVERS = {"ascendv1_saver": "ascend", "compressed_tensors": "vllm"}
_UPSTREAM_SPEC = {"process", "dataset", "save", "runner"}
_KINDS = ("quarot", "flex_awq_ssz", "flex_smooth_quant", "linear_quant", "group")


def parse_recipe(raw: Any, where: str) -> Recipe:
    """A recipe from a parsed file: ours, or msModelSlim's with `spec`. Raises ConfigError naming the key."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: got {type(raw).__name__}, allowed: a table with the key process")
    try:
        flat = _flattened(_from_spec(raw) if "spec" in raw else raw)
        return Recipe.model_validate(flat)
    except ValidationError as err:
        path, value, allowed = first_error(err)
        for each in err.errors(include_url=False):
            if each["type"] == "extra_forbidden":
                path, value, allowed = complaint(each)
                break
        raise ConfigError(f"{where}: {refuse('.'.join(path), value, allowed)}") from None
    except ConfigError as err:
        raise ConfigError(f"{where}: {err}") from None


def _from_spec(raw: dict[str, Any]) -> dict[str, Any]:
    """msModelSlim's file: `apiversion`, `metadata`, anchors of YAML, and `spec`, of which all keys are checked."""
    if raw.get("apiversion", "modelslim_v1") != "modelslim_v1":
        raise refuse("apiversion", raw["apiversion"], "modelslim_v1")
    spec = raw["spec"]
    if not isinstance(spec, dict):
        raise refuse("spec", spec, "a table")
    unknown = sorted(spec.keys() - _UPSTREAM_SPEC)
    if unknown:
        raise refuse(f"spec.{unknown[0]}", spec[unknown[0]], f"the keys {', '.join(sorted(_UPSTREAM_SPEC))}")
    if spec.get("runner", "auto") not in ("auto", "layer_wise", "dp_layer_wise"):
        raise refuse("spec.runner", spec["runner"], "auto, layer_wise or dp_layer_wise: layers are streamed")
    if not isinstance(given := spec.get("save", []), list):
        raise refuse("spec.save", given, "a list of tables with type")
    savers = [str(each.get("type")) for each in given if isinstance(each, dict)]
    for saver in savers:
        if saver not in _SAVERS:
            raise refuse("spec.save.type", saver, ", ".join(_SAVERS))
    flat = {key: spec[key] for key in ("process", "dataset") if key in spec}
    return flat | ({"save": _SAVERS[savers[0]]} if savers else {})


def _flattened(raw: dict[str, Any]) -> dict[str, Any]:
    """Steps of a `group` in its place; `default_...` keys (YAML anchors) left out. Unknown kinds are refused here."""
    steps: list[Any] = []
    process = raw.get("process")
    if not isinstance(process, list | tuple):
        raise refuse("process", process, "a list of steps")
    for idx, step in enumerate(process):
        if not isinstance(step, dict) or step.get("type") not in _KINDS:
            raise refuse(f"process.{idx}.type", step.get("type") if isinstance(step, dict) else step, ", ".join(_KINDS))
        if step["type"] != "group":
            steps.append(step)
            continue
        if unknown := sorted(step.keys() - {"type", "configs"}):
            raise refuse(f"process.{idx}.{unknown[0]}", step[unknown[0]], "the key configs")
        inner = _flattened({"process": step.get("configs")})["process"]
        steps.extend(inner)
    return {**raw, "process": steps}
