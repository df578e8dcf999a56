"""What becomes of each module: a recipe's patterns, matched once, and checked against what the target can load.

A module is a tensor's name without `.weight`; a stack of experts is one module, `mlp.experts.*.up_proj` of its layer.
"""

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from glm5.checkpoint.formats.base import Schemes
from glm5.checkpoint.names import MERGED, OUTER, STACK, place_of
from glm5.common.errors import ConfigError
from glm5.config.model import ModelConfig
from glm5.config.quantize import Target
from glm5.config.recipe import ActGrid, Filter, FlexAwq, FlexSmooth, QConfig, Recipe, WeightExt, WeightGrid
from glm5.config.tensors import tensor_specs
from glm5.kernels.block_scaled import BLOCK
from glm5.quant.record import Grid, Scheme

NVFP4_GROUP = 16
_MTP = re.compile(r"\{mtp\}")


@dataclass(frozen=True)
class LinearPlan:
    """How a module's weight is quantized, and what meets it."""

    scheme: Scheme
    method: str
    ext: WeightExt


@dataclass(frozen=True)
class Plan:
    """All modules of a model. `linears`: layer index -> module -> plan; what is not there stays as it is."""

    cfg: ModelConfig
    recipe: Recipe
    target: Target
    linears: dict[int, dict[str, LinearPlan]] = field(default_factory=dict)

    def layer(self, layer_idx: int) -> dict[str, LinearPlan]:
        return self.linears.get(layer_idx, {})

    @property
    def schemes(self) -> Schemes:
        return {
            layer_idx: {module: linear.scheme for module, linear in linears.items()}
            for layer_idx, linears in self.linears.items()
        }

    def smoothing(self, layer_idx: int, module: str, kind: str) -> FlexSmooth | FlexAwq | None:
        """The step that smooths a subgraph, by the module that its scales are divided out of; the last one counts."""
        names = disk_names(layer_idx, module, self.cfg)
        found = [
            step
            for step in self.recipe.smoothing
            if kind in step.enable_subgraph_type and _agreed(step, names, self.cfg)
        ]
        return found[-1] if found else None


def disk_names(layer_idx: int, module: str, cfg: ModelConfig) -> list[str]:
    """Modules on disk that a module of a layer stands for: each expert of a stack."""
    if module.startswith(STACK):
        leaf = module.removeprefix(STACK)
        return [f"model.layers.{layer_idx}.mlp.experts.{expert}.{leaf}" for expert in range(cfg.n_routed_experts)]
    return [module if layer_idx == OUTER else f"model.layers.{layer_idx}.{module}"]


def make_plan(cfg: ModelConfig, recipe: Recipe, target: Target) -> Plan:
    """A recipe's patterns matched with a model's modules. ConfigError names a module that cannot be honoured."""
    recipe = with_mtp_index(recipe, cfg)
    plan = Plan(cfg, recipe, target)
    modules = dict.fromkeys(
        (place.layer_idx, place.name.removesuffix(".weight"))
        for spec in tensor_specs(cfg)
        if spec.fp8
        for place in [place_of(spec.name)]
    )
    for layer_idx, module in modules:
        names = disk_names(layer_idx, module, cfg)
        matching = [step for step in recipe.linears if _agreed(step, names, cfg)]
        if matching:
            config = matching[-1].qconfig
            linear = LinearPlan(scheme_of(config), config.weight.method, config.weight.ext)
            plan.linears.setdefault(layer_idx, {})[module] = linear
    if not plan.linears:
        patterns = ", ".join(pattern for step in recipe.linears for pattern in step.include)
        raise ConfigError(f"no linear layer fits the recipe's patterns: {patterns}")
    _check_fused(plan)
    _check_groups(plan)
    return plan


def unmatched(cfg: ModelConfig, recipe: Recipe) -> list[str]:
    """Patterns of a recipe that fit no module."""
    names = [spec.name.removesuffix(".weight") for spec in tensor_specs(cfg) if not place_of(spec.name).expert]
    steps = [step for step in with_mtp_index(recipe, cfg).process if isinstance(step, Filter)]
    patterns = dict.fromkeys(pattern for step in steps for pattern in (*step.include, *step.exclude))
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def with_mtp_index(recipe: Recipe, cfg: ModelConfig) -> Recipe:
    """{mtp} in patterns becomes the MTP layer's index."""
    index = str(cfg.num_hidden_layers)

    def put(patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_MTP.sub(index, pattern) for pattern in patterns)

    steps = tuple(
        step.model_copy(update={"include": put(step.include), "exclude": put(step.exclude)})
        if isinstance(step, Filter)
        else step
        for step in recipe.process
    )
    return recipe.model_copy(update={"process": steps})


def scheme_of(config: QConfig) -> Scheme:
    """Grids of a recipe's qconfig."""
    return Scheme(weight_grid(config.weight), act_grid(config.act))


def weight_grid(weight: WeightGrid) -> Grid:
    kind = {"int8": "int", "int4": "int", "fp8_e4m3": "fp8", "nvfp4": "nvfp4"}[weight.dtype]
    bits = {"int8": 8, "int4": 4, "fp8_e4m3": 8, "nvfp4": 4}[weight.dtype]
    scope = weight.scope.removeprefix("per_")
    group = None
    if scope == "block":
        group = BLOCK
    elif scope == "group":
        group = weight.ext.group_size or (NVFP4_GROUP if kind == "nvfp4" else BLOCK)
    return Grid(kind, bits, scope, group, weight.symmetric)  # type: ignore[arg-type]


def act_grid(act: ActGrid) -> Grid | None:
    """None for activations that stay as they are."""
    if act.dtype == "float":
        return None
    scope = act.scope.removeprefix("per_")
    return Grid("int" if act.dtype == "int8" else "fp8", 8, scope, BLOCK if scope == "group" else None)  # type: ignore[arg-type]


def _agreed(step: Filter, names: list[str], cfg: ModelConfig) -> bool:
    """Whether a step takes the module; ConfigError where it takes some experts of a layer only."""
    taken = [step.takes(name) for name in names]
    if any(taken) and not all(taken):
        other = names[taken.index(False)]
        raise ConfigError(
            f"{other}: the recipe treats it unlike other experts of its layer; engines hold the {cfg.n_routed_experts} "
            "experts of a layer in one tensor, so they need one scheme"
        )
    return taken[0]


def _check_fused(plan: Plan) -> None:
    """Engines merge some projections into one product; their parts must be alike."""
    for layer_idx, linears in plan.linears.items():
        for one, *others in MERGED.values():
            for other in others:
                first, second = linears.get(one), linears.get(other)
                if (first and first.scheme) != (second and second.scheme):
                    raise ConfigError(
                        f"model.layers.{layer_idx}.{one} and {other} must share one scheme, as engines compute them "
                        "in one product: let the recipe's patterns take both or neither"
                    )


def _check_groups(plan: Plan) -> None:
    """Rows must divide into groups; said before a run, not in its middle."""
    shapes = {
        (p.layer_idx, p.name.removesuffix(".weight")): s.shape
        for s in tensor_specs(plan.cfg)
        for p in [place_of(s.name)]
    }
    for layer_idx, linears in plan.linears.items():
        for module, linear in linears.items():
            try:
                linear.scheme.weight.scale_shape(shapes[layer_idx, module])
            except ConfigError as err:
                raise ConfigError(f"model.layers.{layer_idx}.{module}: {err}") from None
