"""Recipes by name or file, and what settings of a run make of them: one resolved recipe and one target."""

import logging
import os
import tomllib
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import yaml

from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import ConfigError
from glm5.config.quantize import QuantizeConfig, Target
from glm5.config.recipe import LinearQuant, Recipe, WeightExt
from glm5.config.recipe_file import parse_recipe
from glm5.config.refusal import refuse

logger = logging.getLogger(__name__)

_UNREADABLE = (yaml.YAMLError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)
"""What parsers raise: PyYAML lets through what its constructors meet in a value that does not fit its tag."""


MAX_NODES = 10_000
"""Limit for the values of a YAML file. A recipe has hundreds."""


class Resolved(NamedTuple):
    """A recipe with every choice made. `notes`: what was decided and why, a sentence each."""

    recipe: Recipe
    target: Target
    name: str
    notes: tuple[str, ...] = ()


def resolve(settings: QuantizeConfig) -> Resolved:
    """The recipe and target of a run. ConfigError for what contradicts itself."""
    if settings.recipe is not None:
        path = Path(settings.recipe).expanduser()
        recipe, name = read_recipe(path), path.name
        target = settings.target or recipe.save or "glm5"
    else:
        target = settings.target or "glm5"
        name = _built_in(settings, target)
        recipe = built_in(name)
    notes = list(recipe.notes)
    if recipe.save not in (None, target):
        notes.append(f"--target {target} in place of the recipe's {recipe.save}")
    if settings.method is not None:
        if not any(_is_int4(step) for step in recipe.process):
            raise ConfigError(
                f"--method {settings.method} says how 4-bit integer weights are found, of which {name} has none; "
                "allowed: leave --method out, or --scheme w4a8 or w4a16"
            )
        recipe = with_method(recipe, settings.method)
    rotation = recipe.rotation
    if rotation is not None and rotation.residual and settings.mtp == "keep" and target in ("vllm", "sglang", "gguf"):
        recipe = _replaced(recipe, rotation, residual=False)
        notes.append(
            f"the residual stream is not rotated: {target} has no place for what MTP would need; "
            "--mtp drop rotates it and leaves MTP out"
        )
    if target == "gguf" and any(step.qconfig.act.dtype != "float" for step in recipe.linears):
        notes.append(
            "GGUF holds weights only: llama.cpp rounds inputs in its own way; what is measured here rounds them as the "
            "recipe says"
        )
    if rotation is not None and rotation.seed is None:
        recipe = _replaced(recipe, recipe.rotation, seed=settings.seed)
    return Resolved(recipe, target, name, tuple(notes))


def as_they_are(settings: QuantizeConfig) -> Resolved:
    """As `resolve`, without smoothing and rotation: the codes of a weight depend on itself alone."""
    resolved = resolve(settings)
    steps = tuple(step for step in resolved.recipe.process if isinstance(step, LinearQuant))
    return resolved._replace(recipe=resolved.recipe.model_copy(update={"process": steps}))


def built_in(name: str) -> Recipe:
    """A recipe that comes with the package, by its file's name without the ending."""
    file = resources.files("glm5.quantize") / "recipes" / f"{name}.toml"
    return parse_recipe(tomllib.loads(file.read_text(encoding="utf-8")), file.name)


def read_recipe(path: Path) -> Recipe:
    """A recipe from a .toml, .yaml or .yml file."""
    try:
        text = read_bounded_text(path, SETTINGS, ConfigError)
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"{path}: cannot be read: {getattr(err, 'strerror', None) or err}") from None
    try:
        if path.suffix == ".toml":
            raw: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            raw = _yaml(text)
        else:
            raise refuse("--recipe", str(path), "a file ending in .toml, .yaml or .yml")
    except ConfigError:
        raise
    except _UNREADABLE as err:
        raise ConfigError(f"{path}: cannot be understood: {' '.join(str(err).split())}") from None
    recipe = parse_recipe(raw, str(path))
    if recipe.dataset is not None and os.path.isfile(sibling := path.parent / recipe.dataset):
        recipe = recipe.model_copy(update={"dataset": str(sibling)})
    elif recipe.dataset is not None:
        logger.info("%s: dataset %s is not beside it: --calibration decides", path, recipe.dataset)
        recipe = recipe.model_copy(update={"dataset": None})
    return recipe


def _yaml(text: str) -> Any:
    """One document. Raises ValueError for a key that is there twice, and for anchors that grow beyond MAX_NODES or lead
    back to themselves."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _num_nodes(node, {}) > MAX_NODES:
            raise ValueError(f"with what its anchors repeat it has more than {MAX_NODES:,} values")
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _num_nodes(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Nodes of the tree that a graph of anchors stands for."""
    if node in known:
        if not known[node]:
            raise ValueError(f"an anchor leads back to itself{node.start_mark}")
        return known[node]
    known[node] = 0  # begun
    parts: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        names = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if double := next((name for name, count in names.items() if count > 1), None):
            raise ValueError(f"the key {double!r:.60} is there twice{node.start_mark}")
        parts = [part for pair in node.value for part in pair]
    elif isinstance(node, yaml.SequenceNode):
        parts = node.value
    known[node] = 1 + sum(_num_nodes(part, known) for part in parts)
    return known[node]


def _built_in(settings: QuantizeConfig, target: Target) -> str:
    scheme = settings.scheme or ("w4a16" if target == "gguf" and settings.w4a8_weights is None else "w4a8")
    if scheme != "w4a8":
        return scheme
    own = {"glm5": "channel", "ascend": "channel", "vllm": "group", "sglang": "sglang", "gguf": "channel"}[target]
    requested = settings.w4a8_weights
    if requested is None or (requested == "group" and own == "sglang"):
        return f"w4a8-{own}"
    if target != "glm5" and requested != own:
        taken = {"channel": "int4 per channel", "group": "groups of 128", "sglang": "groups of 128"}[own]
        raise ConfigError(f"--w4a8-weights {requested}: w4a8 for {target} has {taken}; --target glm5 has both")
    return f"w4a8-{requested}"


def with_method(recipe: Recipe, method: str) -> Recipe:
    """The same recipe with another method for its 4-bit integer weights; `minmax` for weights alone also leaves
    nothing else to do, so that a QAT checkpoint passes unchanged."""
    steps: list[Any] = []
    for step in recipe.process:
        if _is_int4(step):
            ext = WeightExt(group_size=step.qconfig.weight.ext.group_size)
            weight = step.qconfig.weight.model_copy(update={"method": method, "ext": ext})
            step = step.model_copy(update={"qconfig": step.qconfig.model_copy(update={"weight": weight})})
        steps.append(step)
    return recipe.model_copy(update={"process": tuple(steps)})


def _is_int4(step: Any) -> TypeGuard[LinearQuant]:
    return isinstance(step, LinearQuant) and step.qconfig.weight.dtype == "int4"


def _replaced(recipe: Recipe, old: Any, **changes: Any) -> Recipe:
    steps = tuple(step.model_copy(update=changes) if step is old else step for step in recipe.process)
    return recipe.model_copy(update={"process": steps})
