"""msModelSlim's file with one thing changed at random: the change acts, or is refused by the name of its key."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm5.common.errors import ConfigError
from glm5.config.recipe import Recipe
from glm5.config.recipe_file import parse_recipe
from glm5.quant.graph import SUBGRAPHS
from glm5.quantize.plan import make_plan, unmatched
from tests.unit.quantize.conftest import small

SEED, NUM = 20261129, 300
OTHERS = {
    bool: [True, False],
    int: [0, 1, 2, 3, 5, 8, 10, 64],
    float: [0.0, 0.25, 0.5, 1.0],
    str: ["per_token", "per_channel", "per_group", "int8", "int4", "minmax", "ssz", "gptq"],
}
CONTRADICTED = ("metadata.label.", "ext.step", "rows of ")
"""Named where what is changed contradicts them."""
ANCHORS = ("eight", "four")
WORDS = (
    "alpha",
    "beta",
    "symetric",
    "step",
    "group_size",
    "include",
    "exclude",
    "part_file_size",
    "ext",
    "note",
    "damp",
)


@pytest.fixture(scope="module")
def base() -> Any:
    """Patterns speak of the small model's layers; GLM-5's MTP layer is 78, this one's 3."""
    text = (Path(__file__).parent / "upstream.yaml").read_text()
    text = text.replace("model.layers.78*", "model.layers.3*").replace("model.layers.78.", "model.layers.3.")
    return text.replace('"model.layers.1.*", "model.layers.2.*", ', "").replace(
        '        - "model.layers.1.mlp.*"\n        - "model.layers.2.mlp.*"\n', ""
    )


def tables(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every table and list of a file, with its path."""
    if isinstance(value, dict | list):
        yield path, value
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tables(part, (*path, key))


def mutate(raw: Any, rng: random.Random) -> tuple[str, str]:
    """One change in place; returns what was done and the name of its key. Aliases are one table and change together."""
    path, table = rng.choice(list(tables(raw)))
    kind = rng.choice(["add", "rename", "replace", "replace"])
    where = ".".join(map(str, path))
    if isinstance(table, list) or kind == "replace":
        keys = list(table) if isinstance(table, dict) else list(range(len(table)))
        if not keys:
            table.append("nothing")
            return f"{where} += nothing", str(path[-1])
        key = rng.choice(keys)
        old = table[key]
        others = [f"nothing {old}"] if "*" in str(old) else OTHERS.get(type(old), [None, "text", 7])
        new = rng.choice([each for each in others if each != old])
        table[key] = new
        return f"{where}.{key}: {old!r:.60} -> {new!r}", str(key if isinstance(key, str) else path[-1])
    if kind == "add" or not table:
        key = rng.choice([word for word in WORDS if word not in table])
        table[key] = rng.choice([True, 1, 0.5, "text", {"a": 1}, [2]])
        return f"{where} + {key}: {table[key]!r}", key
    key = rng.choice([key for key in table if key not in ANCHORS])  # whose names are free
    table[f"{key}s"] = table.pop(key)
    return f"{where}.{key} -> {key}s", key


def effect(recipe: Recipe) -> Any:
    """All that a recipe does: to every module and subgraph, to the files, and what it prints."""
    cfg = small().replace(n_routed_experts=2, num_experts_per_tok=1)
    plan = make_plan(cfg, recipe, recipe.save or "glm5")
    searches = []
    for layer_idx in range(cfg.num_layers_with_mtp):
        for subgraph in SUBGRAPHS:
            step = plan.smoothing(layer_idx, subgraph.source, subgraph.kind)
            held = None if step is None else step.model_dump(exclude={"include", "exclude", "enable_subgraph_type"})
            searches.append(held)
    files = (recipe.save, recipe.max_shard_gb, recipe.dataset)
    return plan.linears, searches, recipe.rotation, files, recipe.notes, unmatched(cfg, recipe)


def test_every_change_acts_or_is_refused_by_name(base):
    file = yaml.safe_load(base)
    before = effect(parse_recipe(file, "r"))
    rng, silent, refused = random.Random(SEED), [], 0
    for _ in range(NUM):
        raw = copy.deepcopy(file)
        change, key = mutate(raw, rng)
        assert raw != file, change
        try:
            after = effect(parse_recipe(raw, "r"))
        except ConfigError as error:
            refused += 1
            if not any(name in str(error) for name in (key, *CONTRADICTED)):
                silent.append(f"{change}: refused without its name: {error}")
            continue
        if after == before:
            silent.append(f"{change}: does nothing")
    assert not silent, f"{SEED=}: {len(silent)} of {NUM}\n" + "\n".join(silent)
    assert NUM / 4 < refused < NUM
