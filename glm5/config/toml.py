"""Recipes in TOML: files with settings of the command line over them, as frozen sections that know every key.

A wrong value is one line that says the file, the key, the value and what is allowed; an unknown key names the nearest.
"""

import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import ConfigError
from glm5.config.refusal import complaint, first_error, refuse

S = TypeVar("S", bound=BaseModel)


def read_toml(path: str | Path, settings: Sequence[str], root: type[S]) -> S:
    """The recipe of a file with `settings` (KEY=VALUE) over it. Raises ConfigError naming the file and the key."""
    file = Path(path)
    try:
        text = read_bounded_text(file, SETTINGS, ConfigError)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be understood: {error}") from None
    for setting in settings:
        _set(raw, setting)
    return checked(raw, str(file), root)


def checked(raw: Mapping[str, Any], where: str, root: type[S]) -> S:
    """A recipe from a parsed file. Raises ConfigError naming the place and the key."""
    try:
        return root.model_validate_json(json.dumps(raw, default=str), strict=True)
    except RecursionError as error:
        raise ConfigError(f"{where}: cannot be understood: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explained(error, root)}") from None


def toml_of(value: Any) -> str:
    """A value of a parsed file as it is written in TOML, on one line; a table in braces."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml_of(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_of, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _explained(error: ValidationError, root: type[BaseModel]) -> str:
    """The first error as one line; unknown keys come first, as they often explain missing ones."""
    for each in error.errors(include_url=False):
        if each["type"] in ("extra_forbidden", "union_tag_invalid"):
            path, value, _ = complaint(each)
            if each["type"] == "union_tag_invalid":
                allowed = each.get("ctx", {})["expected_tags"].replace("'", "")
                return str(refuse(f"{_key(path, root)}.kind", value.get("kind"), allowed))
            return f"{_key(path, root)}: no such key; {nearest(path[-1], _section_at(path[:-1], root).model_fields)}"
    path, value, allowed = first_error(error)
    if isinstance(value, dict) and error.errors()[0]["type"] == "value_error":  # keys that do not fit each other
        return f"{_key(path, root) or 'the recipe'}: {allowed}"
    return str(refuse(_key(path, root) or "the recipe", value, allowed))


def nearest(key: str, known: Collection[str]) -> str:
    """A hint for an unknown key."""
    near = get_close_matches(key, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"


def _key(path: Sequence[str], root: type[BaseModel]) -> str:
    """A place as it is written in TOML: without the kinds that pydantic names on its way."""
    return ".".join(_walk(path, root)[0])


def _section_at(path: Sequence[str], root: type[BaseModel]) -> type[BaseModel]:
    """The section that a place in a recipe belongs to."""
    return _walk(path, root)[1]


def _walk(path: Sequence[str], root: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    sections, written = [root], list[str]()
    for part in path:
        if sections and part in sections[0].model_fields:
            sections = _sections_in(sections[0].model_fields[part].annotation) or sections
        elif of_kind := [one for one in sections if part in _kinds_of(one)]:
            sections = of_kind
            continue
        written.append(part)
    return written, sections[0]


def _sections_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections_in(part)]


def _kinds_of(section: type[BaseModel]) -> tuple[Any, ...]:
    field = section.model_fields.get("kind")
    return get_args(field.annotation) if field is not None else ()


def _set(raw: dict[str, Any], setting: str) -> None:
    """One KEY=VALUE; the value is TOML, or else a text."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise refuse("--set", setting, "KEY=VALUE, such as stage.0.steps=10")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except (ValueError, RecursionError) as error:  # more digits or brackets than Python reads
        raise ConfigError(f"--set {setting:.60}: cannot be understood: {error}") from None
    *parents, last = key.split(".")
    place: Any = raw
    for part in parents:
        place = _inside(place, part, setting, make=True)
    _inside(place, last, setting, make=False)
    place[int(last) if isinstance(place, list) else last] = value


def _inside(place: Any, part: str, setting: str, *, make: bool) -> Any:
    if isinstance(place, list):
        if not part.isdecimal() or int(part) >= len(place):
            raise refuse("--set", setting, f"a number from 0 to {len(place) - 1} in place of {part!r}")
        return place[int(part)]
    if not isinstance(place, dict):
        raise refuse("--set", setting, f"a key of a table: there is nothing inside to be called {part!r}")
    return place.setdefault(part, {}) if make else None
