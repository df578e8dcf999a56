"""Flags are made from config classes, and what they say becomes a config or a refusal that names the flag."""

from typing import Annotated, Literal, get_origin

import pytest
from pydantic import Field, ValidationError

from glm5.cli.flags import add_flags, notes, read
from glm5.cli.main import COMMANDS, parsers
from glm5.cli.parser import Parser
from glm5.common.errors import UsageError
from glm5.config.command import Command, NoEffect, Positional


class Inner(Command):
    """Inner."""

    method: Literal["mtp"] = "mtp"
    """How."""
    num_tokens: Annotated[int, Field(ge=1)] = 3
    """How many."""


class Outer(Command):
    """Outer."""

    model: Annotated[str, Positional()]
    """Which, 100 % sure."""
    max_len: Annotated[int, Field(ge=1)] | None = None
    """How long."""
    share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """How much."""
    kind: Literal["a", "b"] = "a"
    """What kind."""
    names: tuple[str, ...] = ()
    """Called."""
    quiet: bool = False
    """Say less."""
    checks: bool = True
    """Check more."""
    legacy: Annotated[int, NoEffect("nothing reads it")] = 1
    """Old."""
    inner_config: Annotated[Inner | None, NoEffect("not yet")] = None
    """Nested."""


class Needs(Command):
    """Needs."""

    out: str
    """Where."""


def parse(*argv: str, config: type[Command] = Outer) -> Command:
    parser = Parser(prog="prog")
    add_flags(parser, config)
    parser.check_names(argv)
    return read(config, parser.parse_args(argv))


def configs(base: type[Command] = Command) -> list[type[Command]]:
    """Those of all commands."""
    return [each for kind in base.__subclasses__() for each in (kind, *configs(kind)) if each not in (Outer, Inner)]


def test_no_flag_takes_an_empty_text():
    parsers(*COMMANDS)
    seen = 0
    for config in configs():
        texts = {name: field for name, field in config.model_fields.items() if "str" in str(field.annotation)}
        for name, field in texts.items():
            values = [""] if get_origin(field.annotation) is tuple else ""
            with pytest.raises(ValidationError) as caught:
                config.model_validate({field.alias or name: values})
            assert any(error["loc"][0] == (field.alias or name) for error in caught.value.errors()), (config, name)
            seen += 1
    assert seen > 100, seen


def test_defaults_are_the_config_s_and_count_as_not_given():
    assert parse("m") == Outer(model="m")
    assert parse("m").model_fields_set == {"model"}


def test_every_kind_of_value():
    named = ["--names", "x", "y", "--names", "z"]
    assert parse(
        "m", "--max-len", "5", "--share=0.5", "--kind", "b", *named, "--quiet", "--no-checks", "--legacy", "2"
    ) == Outer(model="m", max_len=5, share=0.5, kind="b", names=("x", "y", "z"), quiet=True, checks=False, legacy=2)


@pytest.mark.parametrize(
    "argv",
    [
        ["--inner-config", '{"method": "mtp", "num_tokens": 5}'],
        ["--inner-config.num_tokens", "5"],
        ["--inner-config.method=mtp", "--inner-config.num_tokens=5"],
    ],
)
def test_nested_settings_are_json_or_dotted(argv):
    assert parse("m", *argv) == Outer(model="m", inner_config=Inner(num_tokens=5))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--max-len", "many"], "--max-len: got 'many'; allowed: an integer"),
        (["m", "--max-len", "0"], "--max-len: got '0'; allowed: at least 1"),
        (["m", "--share", "1.5"], "--share: got '1.5'; allowed: at most 1"),
        (["m", "--kind", "c"], "--kind: got 'c'; allowed: 'a' or 'b'"),
        (["m", "--inner-config", "{"], "--inner-config: got '{'; allowed: a JSON object"),
        (["m", "--inner-config", '{"colour": 1}'], "--inner-config: got 1; allowed: no such key"),
        (["m", "--inner-config.method", "eagle"], "--inner-config.method: got 'eagle'; allowed: 'mtp'"),
        (["m", "--max-length", "5"], "prog has no flag --max-length; did you mean --max-len?"),
        (["--max_len", "5", "m"], "prog has no flag --max_len; did you mean --max-len?"),
        (["m", "--zzz"], "prog has no flag --zzz; see  prog --help"),
        (["m", "-x"], "prog has no flag -x; see  prog --help"),
        (["m", "--max"], "prog has no flag --max; did you mean --max-len?"),  # no guessing from a prefix
        (["m", "--max-len"], "argument --max-len: expected one argument; see  prog --help"),
        ([], "the following arguments are required: MODEL; see  prog --help"),
    ],
)
def test_refusals_name_the_flag(argv, message):
    with pytest.raises(UsageError) as caught:
        parse(*argv)
    assert str(caught.value) == message


def test_a_required_flag_is_asked_for():
    with pytest.raises(UsageError, match="the following arguments are required: --out"):
        parse(config=Needs)


def test_a_value_may_look_like_a_flag_behind_the_separator_or_with_a_space():
    assert parse("--", "--max-length").model == "--max-length"
    assert parse("--share", "0.5", "- a text").model == "- a text"


def test_flags_without_effect_say_so_when_given():
    assert notes(parse("m")) == []
    assert notes(parse("m", "--legacy", "1", "--inner-config.num_tokens", "4")) == [
        "--legacy has no effect: nothing reads it",
        "--inner-config has no effect: not yet",
    ]


def test_help_is_the_string_under_the_field():
    parser = Parser(prog="prog")
    add_flags(parser, Outer)
    text = " ".join(parser.format_help().split())
    assert "Which, 100 % sure." in text
    assert "--kind NAME What kind. One of: a, b. Default: a." in text
    assert "Old. Default: 1. No effect: nothing reads it." in text
    assert "--checks, --no-checks" in text
    assert "--no-quiet" not in text
