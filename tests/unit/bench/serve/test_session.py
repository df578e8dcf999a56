"""Whole runs of `glm5 bench serve` against a scripted server, in virtual time: from the flags to the files."""

import asyncio
import json
import logging
import struct

import pytest

from glm5.bench.serve.report import block, sweep_table, write_json
from glm5.bench.serve.session import measure
from glm5.common.errors import ConfigError, GlmError
from glm5.config.bench_serve import BenchServeConfig
from tests.support.scripted_server import Script, completion, in_memory, plain
from tests.support.virtual_time import virtual_time

TTFT, GAP = 0.5, 0.25
TOKENS_A_WORD, TEMPLATE = 2, 6


class Server:
    """An OpenAI-compatible server in which a word has two tokens, and whose counters go on with every answer."""

    def __init__(self):
        self.requests, self.drafts, self.flushed = [], 0, 0
        self.refusals: list[Script] = []

    def __call__(self, request):
        self.requests.append(request)
        match request.path:
            case "/v1/models":
                return plain({"data": [{"id": "the-model"}]})
            case "/metrics":
                lines = f"vllm:spec_decode_num_drafts_total {self.drafts}\n"
                lines += f"vllm:spec_decode_num_accepted_tokens_total {2 * self.drafts}\n"
                return plain(lines.encode())
            case "/reset_prefix_cache":
                self.flushed += 1
                return plain({})
            case "/v1/completions":
                return self.refusals.pop() if self.refusals else self.complete(request.json)
        return plain({"detail": "Not Found"}, status=404)

    def complete(self, body):
        self.drafts += 10
        prompt, num = body["prompt"], body["max_tokens"]
        size = len(prompt.split()) * TOKENS_A_WORD + TEMPLATE if isinstance(prompt, str) else len(prompt)
        return completion(TTFT, [GAP] * (num - 1), prompt_tokens=size)

    @property
    def completions(self):
        return [request.json for request in self.requests if request.path == "/v1/completions"]


def run(server, *, api_key=None, cancel_at=None, **given):
    settings = BenchServeConfig.model_validate({"random_input_len": 40, "random_output_len": 5} | given)

    async def main():
        if cancel_at is not None:
            asyncio.get_running_loop().call_at(cancel_at, asyncio.current_task().cancel)
        ended = []
        connect = in_memory(server)
        runs = await measure(settings, api_key, lambda _plan: lambda _outcome, _now: None, ended.append, connect)
        assert ended == runs
        return runs

    with virtual_time() as runner:
        return settings, runner.run(main())


def test_a_sweep():
    server = Server()
    settings, runs = run(server, max_concurrency=(1, 2, 4), goodput=("ttft:500", "tpot:200"))
    results = [done.result for done in runs]
    takes = TTFT + 4 * GAP
    assert [result.completed for result in results] == [8, 16, 32]
    assert [result.clients for result in results] == [1, 2, 4]
    for result in results:
        assert result.duration == pytest.approx(8 * takes)
        assert result.output_throughput == pytest.approx(result.clients * 5 / takes)
        assert result.times["ttft"].percentiles == pytest.approx({50.0: 500.0, 90.0: 500.0, 99.0: 500.0})
        assert result.times["tpot"].mean == pytest.approx(250.0)
        assert result.total_input_tokens == 40 * result.completed
        assert result.acceptance_length == 3.0
        assert result.server.num_drafts == 10 * result.completed
        assert result.request_goodput == 0.0  # TPOT is 250 ms
        assert result.num_first_wave == result.clients
        assert not result.honesty.warnings
    assert runs[0].info == ("the-model", "", TEMPLATE, 2.0)
    sent = server.completions
    assert len(sent) == 2 + 8 + 16 + 32  # two to measure tokens a word
    assert {body["model"] for body in sent} == {"the-model"}
    assert len({body["prompt"] for body in sent}) == len(sent)
    text = "\n".join([*(block(result, settings.percentile_metrics) for result in results), sweep_table(results)])
    assert "Output token throughput (tok/s):        13.33" in text
    assert "|       4 |" in text.splitlines()[-1]


def test_one_number_of_clients_sends_what_it_sends_in_a_sweep():
    one, sweep = Server(), Server()
    run(one, max_concurrency=(4,))
    run(sweep, max_concurrency=(1, 4))
    assert [body["prompt"] for body in one.completions[2:]] == [body["prompt"] for body in sweep.completions[2 + 8 :]]


def test_an_open_load():
    server = Server()
    _, runs = run(server, request_rate=2.0, num_prompts=40, seed=3)
    (done,) = runs
    assert done.result.clients is None
    assert [record.sent for record in done.outcome.records] == pytest.approx(
        [done.outcome.start + at for at in done.outcome.plan.arrivals]
    )
    assert 40 / 2.0 * 0.5 < done.result.duration < 40 / 2.0 * 2
    assert done.result.honesty.late_max < 1e-6  # the virtual clock's own resolution


def test_given_times(tmp_path):
    file = tmp_path / "times"
    file.write_text("3\n3.5\n7\n")
    _, (done,) = run(Server(), arrival_times=str(file))
    start = done.outcome.start
    assert [record.sent - start for record in done.outcome.records] == pytest.approx([0.0, 0.5, 4.0])
    with pytest.raises(ConfigError, match="has 3 times for 5 conversations"):
        run(Server(), arrival_times=str(file), num_prompts=5)


def test_conversations_count_as_their_requests():
    server = Server()
    _, (done,) = run(server, max_concurrency=(2,), dataset_name="multi-turn", multi_turn_num_turns=3)
    assert done.result.completed == 2 * 9
    assert done.result.num_first_wave == 2
    _, (done,) = run(Server(), request_rate=3.0, num_prompts=300, dataset_name="multi-turn", multi_turn_num_turns=3)
    last = done.outcome.plan.arrivals[-1]
    assert done.result.completed / last == pytest.approx(3.0, rel=0.2)  # 100 gaps: two standard errors


def test_a_file_is_gone_through_in_order(tmp_path, caplog):
    file = tmp_path / "rows"
    file.write_text("\n".join(json.dumps({"prompt": f"p{k}", "max_tokens": 2}) for k in range(5)))
    server = Server()
    with caplog.at_level(logging.WARNING, logger="glm5"):
        run(server, dataset_name="file", dataset_path=str(file), max_concurrency=(1, 2), num_prompts=2)
        assert [body["prompt"] for body in server.completions[2:]] == ["p0", "p1", "p2", "p3"]
        assert not caplog.records
        run(server, dataset_name="file", dataset_path=str(file), max_concurrency=(3,), num_prompts=6)
    assert "sent more than once" in caplog.text
    assert len(run(Server(), dataset_name="file", dataset_path=str(file))[1][0].outcome.records) == 5


def test_rows_that_the_route_cannot_take(tmp_path):
    file = tmp_path / "rows"
    file.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    with pytest.raises(ConfigError, match="use --backend openai-chat"):
        run(Server(), dataset_name="file", dataset_path=str(file))


def test_warm_up_and_empty_cache_come_first():
    server = Server()
    _, (done,) = run(server, max_concurrency=(2,), num_warmups=3, flush_cache=True)
    paths = [request.path for request in server.requests]
    assert server.flushed == 1
    assert paths[:9] == ["/v1/models"] + ["/v1/completions"] * 5 + ["/flush_cache", "/reset_prefix_cache", "/metrics"]
    assert done.result.completed == 16
    assert len({body["prompt"] for body in server.completions}) == 2 + 3 + 16


def test_a_cache_that_cannot_be_emptied():
    def server(request):
        return plain({"detail": "no"}, status=404) if "cache" in request.path else Server()(request)

    with pytest.raises(GlmError, match=r"--flush-cache: /flush_cache: http 404: no; /reset_prefix_cache: http 404: no"):
        run(server, flush_cache=True)


def test_keys_and_headers_are_sent_and_not_written(tmp_path):
    server = Server()
    settings, runs = run(server, api_key="sk-1", header=("X-Key=secret=1", "X-Two=2"), num_prompts=1)
    assert {r.headers["authorization"] for r in server.requests} == {"Bearer sk-1"}
    assert {r.headers["x-key"] for r in server.requests} == {"secret=1"}
    write_json(tmp_path / "r.json", settings, runs)
    text = (tmp_path / "r.json").read_text()
    assert "secret" not in text
    assert "sk-1" not in text
    assert json.loads(text)["settings"]["header"] == ["X-Key", "X-Two"]


def test_a_server_that_starts_is_waited_for(caplog):
    server = Server()
    server.refusals = [plain({"error": {"message": "loading"}}, status=503)] * 3
    with caplog.at_level(logging.INFO, logger="glm5"):
        _, (done,) = run(server, num_prompts=1)
    assert done.outcome.start == pytest.approx(3.0 + 2 * TTFT)
    assert [record.message for record in caplog.records] == ["waiting for http://127.0.0.1:8000: http 503: loading"]
    server.refusals = [plain({"error": {"message": "loading"}}, status=503)] * 9
    with pytest.raises(GlmError, match="the first request failed: http 503: loading"):
        run(server, ready_check_timeout_sec=4)


def test_a_refusal_is_told_at_once_in_the_servers_words():
    server = Server()
    server.refusals = [plain({"error": {"message": "Unknown parameter: 'ignore_eos'"}}, status=400)]
    with pytest.raises(GlmError, match=r"http 400: Unknown parameter: 'ignore_eos'; --no-ignore-eos leaves"):
        run(server)
    assert "ignore_eos" in server.completions[0]
    run(server, ignore_eos=False, num_prompts=1)
    assert "ignore_eos" not in server.completions[-1]


def test_an_interrupt_ends_the_sweep_with_a_partial_result(tmp_path):
    server = Server()
    settings, runs = run(
        server, max_concurrency=(1, 2, 4), cancel_at=20.0, save_detailed=True, json=str(tmp_path / "x")
    )
    assert [done.result.partial for done in runs] == [False, True]
    partial = runs[1].result
    assert 0 < partial.completed < 16
    assert partial.completed + partial.unfinished == 16
    assert "Partial result (interrupted)" in block(partial, ["ttft"])
    write_json(tmp_path / "x", settings, runs)
    saved = json.loads((tmp_path / "x").read_text())
    assert saved["partial"]
    errors = [request["error"] for request in saved["runs"][1]["requests"]]
    assert errors.count("cancelled") == 2
    assert errors.count(None) == partial.completed


def test_the_json_has_vllms_names(tmp_path):
    settings, runs = run(Server(), max_concurrency=(2,), save_detailed=True, json=str(tmp_path / "x"))
    write_json(tmp_path / "x", settings, runs)
    saved = json.loads((tmp_path / "x").read_text())
    (result,) = saved["runs"]
    names = "duration completed failed total_input_tokens total_output_tokens request_throughput output_throughput "
    names += "total_token_throughput request_goodput max_concurrency max_output_tokens_per_s max_concurrent_requests"
    for metric in ("ttft", "tpot", "itl", "e2el"):
        names += f" mean_{metric}_ms median_{metric}_ms std_{metric}_ms p90_{metric}_ms p99_{metric}_ms"
    assert set(names.split()) <= result.keys()
    assert result["max_concurrency"] == 2
    assert result["mean_ttft_ms"] == pytest.approx(500.0)
    assert result["after_first_wave"]["mean_tpot_ms"] == pytest.approx(250.0)
    assert (saved["model"], saved["tokens_per_word"], saved["partial"]) == ("the-model", 2.0, False)
    assert saved["settings"]["request_rate"] == "inf"
    one = result["requests"][0]
    assert (one["ttft"], one["latency"], one["output_len"], one["input_len"]) == pytest.approx((0.5, 1.5, 5, 40))
    assert one["arrivals"] == pytest.approx([0.5, 0.75, 1.0, 1.25, 1.5])


def test_plots(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is of the extra plot")
    from glm5.bench.serve.plot import write_plot

    _, runs = run(Server(), max_concurrency=(4, 1, 2))
    results = [done.result for done in runs]
    write_plot(tmp_path / "p.png", results, "a title")
    header = (tmp_path / "p.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    assert min(struct.unpack(">II", header[16:24])) > 300
    assert [path.name for path in tmp_path.iterdir()] == ["p.png"]
