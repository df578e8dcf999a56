"""Both sides of a comparison: what is counted, in which order they run, and what the tables say."""

import json

import pytest
import torch

from glm5.bench import measure as module
from glm5.bench import workload
from glm5.bench.measure import measure, ordinary_ids, thread_counts
from glm5.bench.peer import Peer
from glm5.bench.report import document, table
from glm5.bench.run import Answer, Run
from glm5.bench.workload import draw_jobs
from glm5.common.atomic import atomic_write_json
from glm5.common.errors import ConfigError, GlmError
from glm5.config.bench import LatencyConfig, ThroughputConfig
from glm5.engine.llm import LLM
from tests.support.engines import save_tiny
from tests.support.models import random_model

SEED = 5


@pytest.fixture(scope="module")
def llm():
    with LLM(random_model(SEED), max_num_seqs=4, num_gpu_blocks_override=32) as llm:
        yield llm


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(workload, "PROMPT_LENGTHS", (4, 12))
    monkeypatch.setattr(workload, "OUTPUT_LENGTHS", (2, 6))


class Slow:
    """A peer that says `token_id` for ever, one token a second; with two threads it takes twice as long."""

    name, on_cpu = "slow 1.0", True

    def __init__(self, token_id=0):
        self.token_id, self.called = token_id, []

    def warm_up(self, jobs):
        self.called.append(("warm up", torch.get_num_threads()))

    def run_at_once(self, jobs, note="", limit=float("inf")):
        return self._run(jobs, "at once", limit)

    def run_in_turn(self, jobs, note="", limit=float("inf")):
        return self._run(jobs, "in turn", limit)

    def _run(self, jobs, how, limit):
        number = torch.get_num_threads()
        self.called.append((how, number))
        answers = [Answer((self.token_id,) * job.num_output, 0.0, 1.0, 1.0 * job.num_output) for job in jobs]
        seconds = number * sum(job.num_output for job in jobs)
        return None if seconds > limit else Run(answers, seconds)


def test_the_peer_runs_with_its_best_number_of_threads(llm, monkeypatch):
    monkeypatch.setattr(module, "thread_counts", lambda: [1, 2])
    before, peer = torch.get_num_threads(), Slow()
    measured = measure(ThroughputConfig(model="m", num_prompts=3, num_iters=2), llm, peer)
    assert peer.called == [(what, n) for n in (1, 2, 1) for what in ("warm up", "at once")]
    assert torch.get_num_threads() == before
    assert (measured.peer_threads, measured.peer_runs[2]) == (1, [])
    assert measured.peer is not None
    assert measured.peer.tokens_per_second == 1.0
    assert measured.ratio == measured.ours.tokens_per_second


@pytest.mark.parametrize("config", [ThroughputConfig, LatencyConfig])
def test_both_sides_have_the_same_useful_tokens(llm, config):
    measured = measure(config(model="m", num_prompts=4, num_iters=2), llm, Slow())
    wanted = [job.num_output for job in measured.jobs]
    assert measured.peer is not None
    for run in (*measured.our_runs, measured.peer):
        assert [len(answer.token_ids) for answer in run.answers] == wanted
    assert all(answer.sent < answer.first < answer.last for answer in measured.ours.answers)
    sent = [answer.sent for answer in measured.ours.answers]
    assert (len(set(sent)) == 1) == (config is ThroughputConfig)
    # Measured again, nothing is found in a cache.
    assert llm.stats()["prefix_cache"]["hit_tokens"]["device"] == 0


def test_what_is_said_and_written(llm, tmp_path):
    settings = ThroughputConfig(model="m", num_prompts=2, num_iters=1, json=str(tmp_path / "r.json"))
    found = document("throughput", settings, measure(settings, llm, Slow(token_id=3)), dict(llm.table))
    atomic_write_json(tmp_path / "r.json", found)
    read = json.loads((tmp_path / "r.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert read["ratio"] == pytest.approx(read["ours"]["tokens_per_second"] / read["peer"]["tokens_per_second"])
    for side in (read["ours"], read["peer"]):
        assert {"tokens_per_second", "ttft_ms", "tpot_ms", "p50_ttft_ms", "p99_tpot_ms"} <= side.keys()
        assert side["output_tokens"] == read["workload"]["output_tokens"]
    assert read["ours"]["mtp"]["on"]
    assert read["peer"]["equal_answers"] == 0
    text = table(read)
    assert "MTP is on: up to 3 a step, adaptive" in text
    assert "slow 1.0" in text
    assert "equal answers: 0 of 2" in text
    assert text.splitlines()[-1].startswith("ratio: ")


def test_without_a_peer(llm):
    settings = LatencyConfig(model="m", num_prompts=1, num_iters=1)
    found = document("latency", settings, measure(settings, llm, None), {})
    assert (found["peer"], found["ratio"]) == (None, None)
    assert "ratio" not in table(found)


def test_a_context_that_is_too_short_is_refused(llm, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", llm.max_model_len + 1)
    with pytest.raises(ConfigError, match=f"context of {llm.max_model_len + 1} tokens, this engine has"):
        measure(LatencyConfig(model="m"), llm, None)


def test_prompts_have_no_control_tokens(llm, tmp_path):
    assert list(ordinary_ids(llm)) == list(range(llm.cfg.vocab_size))
    with LLM(random_model(SEED), tokenizer=save_tiny(tmp_path / "c", SEED)) as named:
        spelled = [named.tokenizer.decode([token_id], skip_special=True) for token_id in ordinary_ids(named)]
    assert all(spelled)
    assert 0 < len(spelled) < named.cfg.vocab_size


def test_thread_counts():
    counts = thread_counts()
    assert counts[0] == 1
    assert counts == sorted(set(counts))


@pytest.fixture(scope="module")
def peer(tmp_path_factory):
    return Peer(save_tiny(tmp_path_factory.mktemp("peer") / "tiny", SEED), dtype="auto", device="cpu")


def test_transformers_gives_our_answers(llm, peer):
    settings = ThroughputConfig(model="m", num_prompts=4, num_iters=1)
    measured = measure(settings, llm, peer)
    assert measured.peer is not None
    assert [a.token_ids for a in measured.peer.answers] == [a.token_ids for a in measured.ours.answers]
    # What counts is when a request's own last token came, not when the batch was done.
    lasts = [answer.last for answer in measured.peer.answers]
    order = sorted(range(4), key=lambda i: measured.jobs[i].num_output)
    assert [lasts[i] for i in order] == sorted(lasts)
    in_turn = peer.run_in_turn(measured.jobs)
    assert in_turn is not None
    assert [a.token_ids for a in in_turn.answers] == [a.token_ids for a in measured.ours.answers]


def test_transformers_gives_up_when_told(peer):
    jobs = draw_jobs(2, 0, range(100))
    assert peer.run_at_once(jobs, limit=0.0) is None
    assert peer.run_in_turn(jobs, limit=0.0) is None


def test_a_checkpoint_that_transformers_cannot_load(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    with pytest.raises(GlmError, match=r"^transformers [\d.]+ cannot load "):
        Peer(tmp_path, dtype="auto", device="cpu")
