"""Numbers that nothing can be counted or timed with are refused by their fields, before anything overflows."""

from typing import get_args

import pytest
from pydantic import ValidationError

from glm5.config.bench_serve import BenchServeConfig
from glm5.config.command import NoEffect
from glm5.config.generate import ChatConfig, GenerateConfig
from glm5.config.operations import KeyConfig
from glm5.config.refusal import first_error
from glm5.config.serve import ServeConfig

GIVEN = {
    ServeConfig: {"model": "m"},
    ChatConfig: {"model": "m"},
    GenerateConfig: {"model": "m"},
    BenchServeConfig: {},
    KeyConfig: {"name": "n"},
}
VALUES = ["nan", "inf", "-inf", "1e400", "1e30", "9" * 30]
MEANT = {("request_rate", "inf"), ("request_rate", "1e400"), ("request_rate", "1e30"), ("request_rate", "9" * 30)}


def kinds(annotation) -> set:
    """The types that a field may have, those in lists and in unions too."""
    parts = get_args(annotation)
    return {annotation} if not parts else set().union(*(kinds(part) for part in parts if part is not Ellipsis))


def numbers() -> list:
    """(config, field) of all that is a number and has an effect."""
    return [
        pytest.param(config, name, field, id=f"{config.__name__}.{name}")
        for config in GIVEN
        for name, field in config.model_fields.items()
        if kinds(field.annotation) & {int, float} and not any(isinstance(mark, NoEffect) for mark in field.metadata)
    ]


def test_there_are_many():
    assert len(numbers()) > 60


@pytest.mark.parametrize(("config", "name", "field"), numbers())
def test_endless_and_huge_numbers_are_refused(config, name, field):
    is_list = isinstance(field.default, tuple)
    for value in VALUES:
        if (name, value) in MEANT:
            continue
        with pytest.raises(ValidationError) as caught:
            config.model_validate(GIVEN[config] | {field.alias or name: [value] if is_list else value})
        (where, *_), _, allowed = first_error(caught.value)
        assert where == name, value
        assert allowed
