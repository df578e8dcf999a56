"""Rates, requests at the same time and places: what is refused, when it may be tried again, what is given back."""

import pytest

from glm5.serve.http.call import Call
from glm5.serve.http.errors import ApiError
from glm5.serve.http.keys import Tenant
from glm5.serve.http.limits import Limits


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def refused(do, *args) -> ApiError:
    with pytest.raises(ApiError) as caught:
        do(*args)
    return caught.value


def test_a_rate_lets_a_minute_s_worth_through_at_once_and_then_its_pace():
    clock = Clock()
    limits = Limits(requests_per_minute=6, clock=clock)
    a, b = Call("1", Tenant("a")), Call("2", Tenant("b"))
    for _ in range(6):
        limits.enter(a)
        limits.leave(a)
    error = refused(limits.enter, a)
    assert (error.status, error.code, error.retry_after) == (429, "rate_limit_exceeded", 10)
    limits.enter(b)  # another's rate
    clock.now += 9.5
    assert refused(limits.enter, a).retry_after == 1
    clock.now += 0.5
    limits.enter(a)
    assert refused(limits.enter, a).retry_after == 10
    clock.now += 3600
    for _ in range(6):
        limits.enter(a)
    assert refused(limits.enter, a).code == "rate_limit_exceeded"


@pytest.mark.parametrize("rate", [0.1, 1, 7, 59.9])
def test_the_time_that_is_told_is_enough(rate):
    clock = Clock()
    limits, call = Limits(clock=clock), Call("1", Tenant("a", requests_per_minute=rate))
    for _ in range(50):
        try:
            limits.enter(call)
        except ApiError as error:
            clock.now += error.retry_after
            limits.enter(call)


def test_requests_at_the_same_time():
    limits = Limits(max_concurrency=2)
    a, strict = Tenant("a"), Tenant("b", max_concurrency=1)
    first = Call("1", a)
    for call in (first, Call("2", a), Call("3", strict)):
        limits.enter(call)
    for tenant in (a, strict):
        error = refused(limits.enter, Call("4", tenant))
        assert (error.status, error.code) == (429, "concurrency_limit_exceeded")
        assert error.retry_after >= 1
    limits.leave(first)
    limits.leave(first)  # as the end of an answer and that of its task do
    limits.enter(Call("5", a))
    assert refused(limits.enter, Call("6", a)).code == "concurrency_limit_exceeded"


def test_a_refused_request_takes_nothing_of_the_rate():
    limits = Limits(max_concurrency=1, requests_per_minute=2, clock=Clock())
    call = Call("1", Tenant("a"))
    limits.enter(call)
    for _ in range(5):
        assert refused(limits.enter, call).code == "concurrency_limit_exceeded"
    limits.leave(call)
    limits.enter(call)


def test_places_are_for_answers_not_for_requests():
    limits = Limits(4)
    one, two = Call("1"), Call("2")
    limits.enter(one)
    limits.enter(two)
    limits.grow(one, 3)  # one was its own already
    assert limits.num_places == 4
    assert refused(limits.enter, Call("3")).code == "queue_full"
    error = refused(limits.grow, two, 2)
    assert (error.status, error.code) == (429, "queue_full")
    limits.leave(one)
    limits.grow(two, 2)
    limits.grow(two, 1)  # another prompt of the same request
    assert limits.num_places == 3
    limits.leave(two)
    assert limits.num_places == 0


def test_what_can_never_fit_is_not_worth_another_try():
    limits, call = Limits(4), Call("1")
    limits.enter(call)
    error = refused(limits.grow, call, 5)
    assert (error.status, error.param, error.retry_after) == (400, "n", None)
