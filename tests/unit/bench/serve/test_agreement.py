"""A second load generator measures the same run of a scripted server, and both agree.

Their times are the server's script and what the machine adds to it, so medians are compared, and a run that something
disturbed is repeated. `tests/soak/test_bench_agreement.py` has a real server.
"""

import pytest

from tests.support.load_generator import Size, apart, measured_together, ours
from tests.support.scripted_server import Script, completion, plain, serving

TTFT, GAP = 0.2, 0.02
SIZE = Size(clients=4, rounds=3, num_tokens=16)
TOLERANCE, ATTEMPTS = 0.05, 5


def handler(request):
    if request.path != "/v1/completions":
        return plain({}, status=404)
    if request.json["max_tokens"] == 1:
        return completion(0.0, [])
    return completion(TTFT, [GAP] * (SIZE.num_tokens - 1))


def test_two_load_generators_agree():
    with serving(handler) as url:
        for _ in range(ATTEMPTS):
            one, other = measured_together(url, "m", SIZE)
            print(one, other)
            if apart(one, other) < TOLERANCE:
                break
    assert apart(one, other) < TOLERANCE
    assert one["ttft"] == pytest.approx(TTFT * 1000, rel=0.2)  # and both see the script


def test_the_comparison_notices():
    metrics = {"output_throughput": 64.0, "ttft": 200.0}
    assert apart(metrics, metrics | {"ttft": 212.0}) > TOLERANCE
    assert apart(metrics, metrics | {"output_throughput": 60.0}) > TOLERANCE


def test_a_server_that_refuses_is_told_over_sockets_too():
    with serving(lambda _: Script([(0.0, b'{"error": {"message": "no"}}')], status=400)) as url, \
            pytest.raises(Exception, match="http 400: no"):  # fmt: skip
        ours(url, "m", SIZE)
