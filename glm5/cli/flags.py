"""Generates command-line flags from config classes, so that names, types and help texts are defined once.

    add_flags(parser, ServeConfig)         max_model_len becomes --max-model-len, its docstring the help
    settings = read(ServeConfig, args)     checked; a bad value is a UsageError naming the flag
    for line in notes(settings): ...       one line for each given flag that has no effect

A field that is itself a settings class takes JSON, or dotted flags (--speculative-config.method mtp).
"""

import argparse
import json
import re
import types
from collections.abc import Collection, Iterator
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from glm5.cli.parser import Parser
from glm5.common.errors import ConfigError, GlmError, UsageError
from glm5.config.command import Also, Command, NoEffect, Positional
from glm5.config.refusal import first_error, refuse

C = TypeVar("C", bound=Command)
_SETTING = re.compile(r"(?<![\w./-])[a-z]+(?:_[a-z]+)+(?![\w./-])")


class _Flag(NamedTuple):
    """One field as a flag; `path`: the names that lead to it from the config class."""

    path: tuple[str, ...]
    field: FieldInfo
    kind: Any

    @property
    def name(self) -> str:
        return ".".join([_flag_of(self.path[0]), *self.path[1:]])

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *(mark.name for mark in self.field.metadata if isinstance(mark, Also)))

    def mark(self, kind: type) -> Any:
        return next((mark for mark in self.field.metadata if isinstance(mark, kind)), None)


def add_flags(parser: Parser, config: type[Command]) -> None:
    """Add one argument for each field. Values stay text: the config class validates them."""
    parser.description = config.__doc__
    parser.elsewhere, parser.more_words = config.elsewhere, config.more_words
    for flag in _flags(config):
        dest, text = ".".join(flag.path), _help(flag)
        if flag.mark(Positional):
            number = "*" if get_origin(flag.kind) is tuple else None if flag.field.is_required() else "?"
            parser.add_argument(dest, metavar=dest.upper(), nargs=number, default=argparse.SUPPRESS, help=text)
        elif flag.kind is bool:
            action = "store_true" if flag.field.default is False else argparse.BooleanOptionalAction
            parser.add_argument(flag.name, dest=dest, action=action, default=argparse.SUPPRESS, help=text)
        elif get_origin(flag.kind) is tuple:
            parser.add_argument(
                flag.name, dest=dest, nargs="+", action="extend", default=argparse.SUPPRESS, help=text, metavar="X"
            )
        else:
            parser.add_argument(
                *flag.names,
                dest=dest,
                default=argparse.SUPPRESS,
                help=text,
                required=flag.field.is_required() and len(flag.path) == 1,
                metavar=_metavar(flag.kind),
            )


def read(config: type[C], args: argparse.Namespace) -> C:
    """The validated settings. Raises UsageError naming the first invalid flag."""
    given: dict[str, Any] = {}
    known = {flag.path: flag for flag in _flags(config)}
    for path, flag in sorted(known.items()):
        value = getattr(args, ".".join(path), None)
        if value is None or (value == [] and flag.mark(Positional)):
            continue
        if len(path) == 2:
            given.setdefault(path[0], {})[path[1]] = value
        else:
            given[path[0]] = _from_json(flag, value) if _is_config(flag.kind) else value
    try:
        return config.model_validate(given)
    except ValidationError as err:
        path, value, allowed = first_error(err)
        flag = known.get(path[:2]) or known.get(path[:1])
        if flag is None:
            raise UsageError(f"allowed: {allowed}") from None
        name = flag.path[0].upper() if flag.mark(Positional) else flag.name
        names = [name for flag in known.values() for name in flag.names]
        raise UsageError(str(refuse(name, value, _with_flags(allowed, names)))) from None


def with_flag_name(error: ConfigError, flags: Collection[str]) -> GlmError:
    """A UsageError naming the flag, if the error is about a setting of one of `flags`; else the error itself."""
    key, colon, text = str(error).partition(": ")
    flag = key if key.startswith("--") else _flag_of(key)
    if flag not in flags:
        return error
    return UsageError(f"{flag}{colon}{_with_flags(text, flags)}")


def notes(settings: Command) -> list[str]:
    """One line for each flag that was given and has no effect."""
    lines: list[str] = []
    for flag in _flags(type(settings)):
        mark = flag.mark(NoEffect)
        if mark is not None and len(flag.path) == 1 and flag.path[0] in settings.model_fields_set:
            lines.append(f"{flag.name} has no effect: {mark.why}")
    return lines


def _flag_of(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def _with_flags(text: str, flags: Collection[str]) -> str:
    """Replace names of settings in a sentence by flags, except one-word names, which may be ordinary words."""
    return _SETTING.sub(lambda name: flag if (flag := _flag_of(name[0])) in flags else name[0], text)


def _flags(config: type[Command], path: tuple[str, ...] = ()) -> Iterator[_Flag]:
    for name, field in config.model_fields.items():
        kind = _without_none(field.annotation)
        flag = _Flag((*path, field.alias or name), field, kind)
        yield flag
        if _is_config(kind):
            yield from _flags(kind, flag.path)


def _help(flag: _Flag) -> str:
    text = " ".join((flag.field.description or "").split())
    if get_origin(flag.kind) is Literal:
        text += f" One of: {', '.join(map(str, get_args(flag.kind)))}."
    default = flag.field.default
    if not flag.field.is_required() and default not in (None, (), False):
        text += f" Default: {default}."
    if mark := flag.mark(NoEffect):
        text += f" No effect: {mark.why}."
    return text.replace("%", "%%")


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "NAME"
    return {int: "N", float: "X", str: "TEXT"}.get(kind, "JSON")


def _from_json(flag: _Flag, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(str(refuse(flag.name, text, "a JSON object"))) from None


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = get_args(annotation)[0]  # the others are None, or special texts such as "auto"
    return get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation


def _is_config(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Command)
