"""`glm5 bench serve` and a second load generator load a real server, a process with an engine of its own, at the same
time: every figure of theirs agrees."""

import subprocess
import sys

import pytest

from tests.support.engines import save_tiny
from tests.support.load_generator import Size, apart, measured_together

pytestmark = pytest.mark.slow

SIZE = Size(clients=4, rounds=8, num_tokens=120)
TOLERANCE, ATTEMPTS = 0.05, 10


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Of `glm5 serve` as a process."""
    path = save_tiny(tmp_path_factory.mktemp("server") / "model", 11)
    # The answers are of fixed length, and no drafts: each token is a step of all clients of both generators.
    command = [sys.executable, "-m", "glm5", "serve", str(path), "--port", "0", "--device", "cpu"]
    command += ["--served-model-name", "m", "--num-speculative-tokens", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield next(line for line in process.stdout if line.startswith("listening on ")).split()[-1]
        finally:
            process.kill()


def test_two_load_generators_agree(url):
    """Medians and throughput. What disturbs one more than the other is chance: such a run is repeated."""
    for attempt in range(ATTEMPTS):
        one, other = measured_together(url, "m", SIZE)
        print(f"\nattempt {attempt}: {apart(one, other):.1%} apart", one, other, sep="\n  ")
        if apart(one, other) < TOLERANCE:
            break
    assert apart(one, other) < TOLERANCE
