"""The tensors of all shards of a checkpoint directory, from the shard headers; no weight is read.

Damage is collected, not raised, so that `inspect` can show all of it at once; `load` raises if there is any.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from glm5.checkpoint.formats.ascend import DESCRIPTION
from glm5.checkpoint.gguf.file import FILE as GGUF_FILE
from glm5.checkpoint.shard import TensorEntry, read_header, unique_keys
from glm5.checkpoint.writer import INDEX_NAME, SINGLE_NAME
from glm5.common.bounded import TABLES, read_bounded_text
from glm5.common.errors import CheckpointError


@dataclass(frozen=True)
class ShardIndex:
    """Tensors by name. `source` is the directory or hub id, for messages; `problems` lists the damage."""

    source: str
    entries: dict[str, TensorEntry] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def scan(directory: Path) -> ShardIndex:
    """Read the index and all shard headers of `directory`. Never raises for a damaged checkpoint."""
    try:
        weight_map = read_weight_map(directory)
        files = sorted(set(weight_map.values())) if weight_map else [SINGLE_NAME]
    except CheckpointError as error:
        return ShardIndex(str(directory), problems=(str(error),))
    problems: list[str] = []
    absent = [file for file in files if not (directory / file).is_file()]
    if absent:
        problems.append(f"{directory}: {counted(absent, 'shard')} named by {INDEX_NAME} absent; fetch again")
    by_file: dict[str, list[TensorEntry]] = {}
    for file in files:
        if file in absent:
            continue
        try:
            by_file[file] = read_header(directory / file)
        except CheckpointError as error:
            problems.append(str(error))
    return merge(str(directory), files, by_file, weight_map, problems)


def merge(
    source: str,
    files: list[str],
    by_file: dict[str, list[TensorEntry]],
    weight_map: dict[str, str] | None,
    problems: list[str],
) -> ShardIndex:
    """One index from the headers in `by_file`, which may lack damaged files, checked against `weight_map`."""
    entries: dict[str, TensorEntry] = {}
    duplicates: list[str] = []
    for held in by_file.values():
        for entry in held:
            if entry.name in entries:
                duplicates.append(f"{entry.name} in {entries[entry.name].file} and {entry.file}")
            entries[entry.name] = entry
    misplaced = [
        f"{name} in {file}"
        for name, file in (weight_map or {}).items()
        if file in by_file and (name not in entries or entries[name].file != file)
    ]
    if duplicates:
        problems.append(f"{source}: {counted(duplicates, 'tensor')} stored twice")
    elif misplaced:
        problems.append(f"{source}: {counted(misplaced, 'tensor')} not where {INDEX_NAME} says")
    of_save = {held[0].save: file for file, held in by_file.items() if held}
    if len(of_save) > 1:
        first, second = sorted(of_save.values())[:2]
        problems.append(f"{source}: {first} and {second} are of different saves, perhaps of two steps; copy one whole")
    return ShardIndex(source, entries, tuple(files), tuple(problems))


def read_weight_map(directory: Path) -> dict[str, str] | None:
    """Tensor name to shard file from the index, or None for a checkpoint of a single file."""
    path = directory / INDEX_NAME
    if not path.is_file():
        if (directory / SINGLE_NAME).is_file():
            return None
        if (directory / DESCRIPTION).is_file():
            raise CheckpointError(
                f"{directory}: {DESCRIPTION} says that its weights are AscendV1's, which run on NPUs; for this engine: "
                "glm5 quantize --target glm5"
            )
        if (directory / GGUF_FILE).is_file():
            raise CheckpointError(
                f"{directory}: holds a GGUF, which llama.cpp loads; for this engine: glm5 quantize --target glm5"
            )
        raise CheckpointError(f"{directory}: holds neither {INDEX_NAME} nor {SINGLE_NAME}{_other_weights(directory)}")
    try:
        return parse_weight_map(read_bounded_text(path, TABLES), path)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None


def parse_weight_map(text: str, where: object) -> dict[str, str]:
    """The `weight_map` of an index file's text; `where` names the file in errors."""
    try:
        index = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: corrupt: {error}; fetch it again") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{where}: has no weight_map of tensor names to shard files; fetch it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or "/" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{where}: {name} is said to be in {file!r}, allowed: a .safetensors file beside it")
    return weight_map


def counted(items: list[str], noun: str, num_shown: int = 5) -> str:
    """'2 shards (a, b)', or '9 shards (a, b, c, d, e and 4 more)'."""
    more = f" and {len(items) - num_shown} more" if len(items) > num_shown else ""
    return f"{len(items)} {noun}{'s' * (len(items) != 1)} ({', '.join(items[:num_shown])}{more})"


def _other_weights(directory: Path) -> str:
    other = sorted(
        path.name for suffix in ("safetensors", "bin", "pt", "gguf") for path in directory.glob(f"*.{suffix}")
    )
    return f"; found {counted(other, 'other weight file')}, which no index names" if other else ""
