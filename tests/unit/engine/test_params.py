"""SamplingParams refuses what it cannot honour, naming field, value and what is allowed."""

import pytest

from glm5.common.errors import RequestError
from glm5.engine.params import SamplingParams

BAD = [
    ("n", 2),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", "hot"),
    ("temperature", True),
    ("top_p", 0.0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 2.0),
    ("seed", 2**64),
    ("seed", 1.5),
    ("stop", ["a", ""]),
    ("stop", [3]),
    ("stop", 3),
    ("stop", ["x"] * 65),
    ("stop_token_ids", 5),
    ("stop_token_ids", [-1]),
    ("max_tokens", 0),
    ("max_tokens", 2.5),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", 21),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=str)
def test_bad_values_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match="allowed: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert str(caught.value).startswith(f"{field} is ")


def test_a_single_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="###").stop == ("###",)


def test_but_checks_again():
    params = SamplingParams(temperature=0.5)
    assert params.but(max_tokens=None).max_tokens is None
    with pytest.raises(RequestError, match="top_p is 7"):
        params.but(top_p=7)
