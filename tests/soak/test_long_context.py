"""A prompt of 64k tokens through the whole engine, on `tiny`: figures are printed, costs are counted.

    a token at context T      indexer O(T)      attention O(index_topk)      everything else O(1)

Costs are bytes of all that torch's operations make (what they take time for here), of one decoding step and of a
prompt's last whole chunk; layers in native code make none, and are timed alone. Milliseconds are of CPU time on one
thread; memory is the most since the context before, without what the process had before there was an engine.
"""

import re
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import pytest

from glm5.config.engine import EngineConfig
from glm5.config.presets import preset
from glm5.engine import arithmetic
from glm5.engine.build import build_core
from glm5.engine.cache.kv_cache import PAGE_SIZE, KVCache
from glm5.engine.sampling.params import SamplingParams
from glm5.engine.transport.wire import AddRequest, Updates
from tests.support.dispatch import largest_result
from tests.support.models import random_model
from tests.support.updates import updates_of

CONTEXTS = {"native": (1024, 8192, 65536), "torch": (1024, 4096, 16384)}
CHUNK, NUM_DECODED, NUM_COUNTED = 256, 60, 3
NUM_ANSWERED = NUM_DECODED + NUM_COUNTED + 1
LONGEST = 2 * 65536  # page tables have the next power of two as their width, at every context
MIB = 1 << 20
# Beside the cache: scores of a chunk are made in pieces of up to 16 MiB, and freed memory is kept by the allocator.
WORKSPACE = 64 * MIB


class Costs(NamedTuple):
    """Bytes a token."""

    select: float
    attend: float
    rest: float


class Meter:
    """A core over `tiny` whose steps are timed and, where asked, counted."""

    def __init__(self):
        cfg = preset("tiny").replace(max_position_embeddings=LONGEST)
        self.page_bytes = KVCache.bytes_per_page(cfg, random_model(3).dtype)
        config = EngineConfig(
            max_model_len=LONGEST,
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK,
            num_speculative_tokens=0,
            num_gpu_blocks_override=LONGEST // PAGE_SIZE,
            async_scheduling=False,
        )
        self.core = build_core(random_model(3, cfg), config)
        self.is_native = "native code" in dict(self.core.info.table)["threads"]
        self.num_tokens, self.num_submitted, self.num_answered = 0, 0, 0
        self._counts: dict[str, int] | None = None
        runner = self.core.runner
        launch, cache = runner.launch, runner.cache

        def noting(plan, specs):
            self.num_tokens = sum(item.num_rows for item in plan.items)
            return launch(plan, specs)

        runner.launch = noting
        cache.select_keys = self._counted("select", cache.select_keys)
        cache.attend = self._counted("attend", cache.attend)

    def ask(self, prompt):
        params = SamplingParams(temperature=0, max_tokens=None)
        self.core.receive(AddRequest((self.num_submitted,), prompt, params, (1,), NUM_ANSWERED))
        self.num_submitted += 1
        self.num_answered = 0

    def step(self) -> float:
        """Milliseconds of CPU time; `num_tokens` are how many it computed, `num_answered` came in all."""
        start, self.num_tokens = time.thread_time(), 0
        for message in self.core.step():
            assert isinstance(message, Updates)
            self.num_answered += sum(len(update.token_ids) for update in updates_of(message))
        return (time.thread_time() - start) * 1e3

    def counted_step(self) -> Costs:
        self._counts = {"select": 0, "attend": 0}
        with largest_result() as whole:
            self.step()
        counts, self._counts = self._counts, None
        assert (min(counts.values()) > 0) != self.is_native
        rest = whole.total_bytes - sum(counts.values())
        return Costs(*(num_bytes / self.num_tokens for num_bytes in (*counts.values(), rest)))

    def _counted(self, part, run):
        def call(*args, **kwargs):
            if self._counts is None:
                return run(*args, **kwargs)
            with largest_result() as cost:
                result = run(*args, **kwargs)
            self._counts[part] += cost.total_bytes
            return result

        return call


def status(name: str) -> int:
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's count of resident pages")
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param("native", marks=[pytest.mark.long, pytest.mark.compiler]),
        pytest.param("torch", marks=pytest.mark.long),
    ],
)
def test_a_prompt_of_many_tokens(layers, rng, monkeypatch):
    if layers == "torch":
        monkeypatch.setattr(arithmetic, "use_native", lambda _model, **_: False)
    before, contexts = status("VmRSS"), CONTEXTS[layers]
    meter = Meter()
    assert meter.is_native == (layers == "native")
    prompt = [rng.randrange(320) for _ in range(contexts[-1])]
    decodes, prefills, peaks, num_cached = [], [], [], 0
    for context in contexts:
        Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts anew
        meter.ask(prompt[:context])
        spent = []
        for _ in range(num_cached, context - CHUNK, CHUNK):
            spent.append(meter.step() / CHUNK)
            assert meter.num_tokens == CHUNK
        num_cached = context
        prefills.append(meter.counted_step())
        assert meter.num_answered == 1
        decode_ms = median(meter.step() for _ in range(NUM_DECODED))
        decodes += [counts := meter.counted_step()]
        for _ in range(NUM_COUNTED - 1):
            again = meter.counted_step()
            assert (again.attend, again.rest) == (counts.attend, counts.rest)
            assert 0 <= again.select - counts.select <= counts.select * NUM_COUNTED / context  # a key more a token
        while meter.core.has_work:
            meter.step()
        assert meter.num_answered == NUM_ANSWERED
        peaks.append(status("VmHWM") - before)
        print(
            f"context {context:5}: decode {decode_ms:5.2f} ms a token, prefill {mean(spent):5.3f} (since the context "
            f"before; {mean(spent[-4:]):5.3f} at its end), peak {peaks[-1] / MIB:4.0f} MiB; bytes a token: "
            f"decode {_listed(decodes[-1])}, prefill {_listed(prefills[-1])}"
        )
    if not meter.is_native:
        check(decodes, contexts)
        check(prefills, [context - CHUNK / 2 for context in contexts])
    cache_bytes = (contexts[-1] - contexts[0]) // PAGE_SIZE * meter.page_bytes
    assert peaks[-1] - peaks[0] < cache_bytes + WORKSPACE


def check(costs, num_seen):
    """In proportion to the keys that are seen, or not at all."""
    for (before, after), (first, second) in zip(pairwise(costs), pairwise(num_seen), strict=True):
        assert 0.9 < after.select / before.select / (second / first) < 1.02
        assert after.attend == before.attend
        assert after.rest < before.rest * 1.01


def _listed(costs) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in costs._asdict().items())
