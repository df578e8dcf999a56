"""The wall clock may be set while something runs: it says when something was, never how long it took or what is due.

Everything else goes by `time.monotonic`, `time.perf_counter` or an event loop's clock.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2] / "glm5"
WALL_CLOCK = re.compile(r"\btime\.(time|time_ns|localtime|gmtime)\(|\bdatetime\.(now|utcnow|today)\(|\bdate\.today\(")
DATES = {
    "chat/jinja.py",  # the day that a template tells the model
    "engine/tiers/disk.py",  # stamps of files, which several processes compare; one's own always grow
    "engine/tiers/folder.py",  # their age: an unfinished one that goes too soon is written again
    "engine/transport/kv_events.py",  # when a batch was sent, for whoever reads it
    "kernels/native_code.py",  # the age of an unfinished library's folder
    "serve/app.py",  # when the server began, which /v1/models tells
    "serve/chat/answer.py",  # `created` of answers, as the API has it
    "serve/completions/answer.py",
    "serve/coordination/front_ends.py",  # when the server began, for all front ends
    "serve/responses/answer.py",
    "serve/sglang/loads.py",  # when the figures were read
    "serve/vllm/generate_answer.py",  # `created`
}


def test_durations_do_not_go_by_the_wall_clock():
    found = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if WALL_CLOCK.search(path.read_text())}
    assert found == DATES
