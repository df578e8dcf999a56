"""Recipes from parsed files: ours, or msModelSlim's, whose keys each act, are printed, or are refused by name.

    apiversion, metadata     checked; what they say of the recipe is printed before a run
    spec.process, dataset    our own keys; a `group` holds several steps
    spec.runner              printed: layers are streamed in any case
    spec.save                one saver; its part_file_size (GiB) becomes max_shard_gb

Other keys at the top are anchors of YAML: what they hold must stand somewhere in `spec`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from glm5.common.errors import ConfigError
from glm5.config.recipe import LinearQuant, Recipe, Section
from glm5.config.refusal import complaint, first_error, refuse

GIB_IN_GB = 2**30 / 1e9
_KINDS = ("quarot", "flex_awq_ssz", "flex_smooth_quant", "linear_quant", "group")
_TOP = ("apiversion", "metadata", "spec")


class Label(Section):
    """What a file of msModelSlim says of its recipe; compared with its steps."""

    w_bit: int | None = None
    """Least bits of a quantized weight."""
    a_bit: int | None = None
    """Least bits of activations; 16 if none are quantized."""
    is_sparse: Literal[False] = False
    kv_cache: Literal[False] = False
    fa_quant: Literal[False] = False


class Metadata(Section):
    """By what msModelSlim finds a recipe."""

    config_id: str | None = None
    score: Annotated[float, Field(ge=0, le=100)] | None = None
    verified_tags: dict[str, tuple[tuple[str, ...], ...]] = {}
    verified_model_types: tuple[str, ...] = ()
    label: Label = Label()


class Saver(Section):
    """What is written."""

    type: Literal["ascendv1_saver", "compressed_tensors"]
    part_file_size: Annotated[int, Field(ge=1, le=10**6)] = 4
    """Largest file of weights in GiB. 0, one file for all, is refused: layers are written as they are done."""

    @property
    def target(self) -> Literal["ascend", "vllm"]:
        return "ascend" if self.type == "ascendv1_saver" else "vllm"


class Spec(Section):
    """msModelSlim's `spec`, without the steps."""

    runner: Literal["auto", "layer_wise", "dp_layer_wise"] = "auto"
    process: list[Any]
    dataset: str | None = None
    save: Annotated[tuple[Saver, ...], Field(min_length=1, max_length=1)] = (Saver(type="ascendv1_saver"),)


class _File(Section):
    apiversion: Literal["modelslim_v1"] = "modelslim_v1"
    metadata: Metadata = Metadata()
    spec: Spec


def parse_recipe(raw: Any, where: str) -> Recipe:
    """A recipe from a parsed file: ours, or msModelSlim's with `spec`. Raises ConfigError naming the key."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where}: got {type(raw).__name__}, allowed: a table with the key process")
    try:
        if not raw.keys().isdisjoint(_TOP):
            return _translated(raw)
        return Recipe.model_validate({**raw, "process": _flattened(raw.get("process"), "process")})
    except ValidationError as err:
        path, value, allowed = first_error(err)
        for each in err.errors(include_url=False):
            if each["type"] == "extra_forbidden":
                path, value, allowed = complaint(each)
                break
        raise ConfigError(f"{where}: {refuse('.'.join(path), value, allowed)}") from None
    except ConfigError as err:
        raise ConfigError(f"{where}: {err}") from None


def _translated(raw: Mapping[str, Any]) -> Recipe:
    """msModelSlim's file."""
    file = _File.model_validate({key: raw[key] for key in _TOP if key in raw})
    steps = _flattened(file.spec.process, "spec.process")
    (saver,) = file.spec.save
    given = {"process": steps, "save": saver.target, "max_shard_gb": saver.part_file_size * GIB_IN_GB}
    given |= {} if file.spec.dataset is None else {"dataset": file.spec.dataset}
    recipe = Recipe.model_validate(given)
    held = {id(part) for part in _parts(raw["spec"])}
    for key, value in raw.items():
        if key not in _TOP and not (isinstance(value, dict | list) and id(value) in held):
            allowed = f"the keys {', '.join(_TOP)}, and anchors of YAML to which spec refers"
            raise refuse(str(key), value, allowed)
    _check_label(file.metadata.label, recipe)
    return recipe.model_copy(update={"notes": tuple(_notes(file))})


def _parts(value: Any) -> Iterator[Any]:
    """Tables and lists within a value."""
    if isinstance(value, dict | list):
        yield value
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part)


def _notes(file: _File) -> Iterator[str]:
    labels = file.metadata.model_dump(mode="json", exclude_defaults=True)
    if labels:
        yield f"msModelSlim's labels of the recipe: {json.dumps(labels, ensure_ascii=False)}"
    if file.spec.runner != "auto":
        yield f"runner {file.spec.runner}: layers are streamed, and --device says which GPUs share one"


def _check_label(label: Label, recipe: Recipe) -> None:
    configs = [step.qconfig for step in recipe.process if isinstance(step, LinearQuant)]
    bits = {
        "w_bit": min(4 if config.weight.dtype in ("int4", "nvfp4") else 8 for config in configs),
        "a_bit": min(16 if config.act.dtype == "float" else 8 for config in configs),
    }
    for name, found in bits.items():
        said = getattr(label, name)
        if said not in (None, found):
            raise refuse(f"metadata.label.{name}", said, f"{found}, as the steps have it")


def _flattened(process: Any, where: str) -> list[Any]:
    """Steps of a `group` in its place. Unknown kinds are refused here."""
    steps: list[Any] = []
    if not isinstance(process, list | tuple):
        raise refuse(where, process, "a list of steps")
    for idx, step in enumerate(process):
        if not isinstance(step, dict) or step.get("type") not in _KINDS:
            kind = step.get("type") if isinstance(step, dict) else step
            raise refuse(f"{where}.{idx}.type", kind, ", ".join(_KINDS))
        if step["type"] != "group":
            steps.append(step)
            continue
        if unknown := sorted(map(str, step.keys() - {"type", "configs"})):
            raise refuse(f"{where}.{idx}", unknown[0], "a group with the keys type and configs")
        steps.extend(_flattened(step.get("configs"), f"{where}.{idx}.configs"))
    return steps
