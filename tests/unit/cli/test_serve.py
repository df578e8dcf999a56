"""`glm5 serve` as a process: what it prints, that it answers, and that signals end it cleanly."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from glm5.cli.main import main
from glm5.cli.serve import own_rows
from glm5.config.serve import ServeConfig

SECONDS = 60  # an upper limit for what takes a few
ALL = "so that every request can take part in every step"
KV_CACHE = "--kv-cache-dtype: got bfloat16, but the model computes in torch.float32; allowed here: auto"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True}


@contextmanager
def server(*argv):
    """(process, printed lines, URL) of a server that listens; killed at the end if it still runs."""
    command = [sys.executable, "-m", "glm5", "serve", *argv, "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = []
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if line.startswith("listening on "):
                    break
            assert lines, process.stderr.read()
            yield process, lines, lines[-1].removeprefix("listening on ")
        finally:
            process.kill()


def test_it_says_what_it_chose_answers_and_ends_on_sigterm(checkpoint):
    flags = ["--max-model-len", "512", "--served-model-name", "one", "two", "--trust-remote-code", "--dtype", "float32"]
    with server(checkpoint, *flags) as (process, lines, url):
        said = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
        assert said["--trust-remote-code"] == "has no effect: no code of a checkpoint is ever run"
        assert said["dtype"].startswith("float32 on cpu")
        assert said["context"].startswith("512 tokens")
        assert said["template"] == "glm-5.2"  # tiny shares indices
        assert said["name"] == "one, two"
        assert httpx.get(url + "/health", timeout=SECONDS).status_code == 200
        answer = httpx.post(url + "/v1/chat/completions", json=ASK, timeout=SECONDS).json()
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("one", 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        assert "Traceback" not in process.stderr.read()


def test_ctrl_c_ends_running_answers(checkpoint):
    with server(checkpoint, "--chat-template", "5.1") as (process, lines, url):
        assert "template       glm-5.1" in lines
        body = ASK | {"max_tokens": None, "stream": True}
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=SECONDS) as answer:
            events = answer.iter_lines()
            assert next(events).startswith("data: ")
            process.send_signal(signal.SIGINT)
            rest = [event for event in events if event]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(SECONDS) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("endpoint", "what"),
    [("tcp://*:5557", "listens at"), ("tcp://127.0.0.1:5557", "connects to a subscriber that listens at")],
)
def test_the_start_table_says_where_events_go_and_how_many_processes_answer(endpoint, what):
    events = {"enable_kv_cache_events": True, "endpoint": endpoint}
    settings = ServeConfig(model="m", api_server_count=3, kv_events_config=events)
    assert own_rows(settings) == {
        "name": "m",
        "front ends": "3 processes answer HTTP",
        "kv events": f"the engine {what} {endpoint}",
    }
    assert own_rows(ServeConfig(model="m", served_model_name=("a", "b"))) == {"name": "a, b"}


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["--generation-config", "/nowhere"], 2, "--generation-config: got /nowhere; allowed: auto, vllm, or a folder"),
        (["--dtype", "float32", "--kv-cache-dtype", "bfloat16"], 2, KV_CACHE),
        (["--host", "\udcff"], 2, "--host: got '\\udcff'; allowed: a text in valid Unicode"),
        (["--host", ""], 2, "--host: got ''; allowed: a text that is not empty"),
        (["--speculative-config", "[" * 100_000], 2, "--speculative-config: got '[[["),
        (["--speculative-config", "9" * 5000], 2, "--speculative-config: got '999"),
        (["--host", "256.1.1.1"], 1, "cannot listen on 256.1.1.1 port 0: "),
        (["--host", "a..b"], 1, "cannot listen on a..b port 0: this is neither an address nor a name"),
        (["--api-server-count", "0"], 2, "--api-server-count: got '0'; allowed: at least 1"),
        (["--port", "70000"], 2, "--port: got '70000'; allowed: at most 65535"),
        (["--client-timeout", "inf"], 2, "--client-timeout: got 'inf'; allowed: below 2147483.648"),
        (["--allowed-hosts", "http://a:1"], 2, "--allowed-hosts: got ['http://a:1']; allowed: names without scheme"),
        (["--api-keys-file", "/nowhere"], 1, "/nowhere: No such file or directory; allowed: a file of API keys"),
        (["--otlp-traces-endpoint", "x:4318"], 2, "--otlp-traces-endpoint: got 'x:4318'; allowed: an address "),
    ],
)
def test_what_cannot_be_honoured_is_one_line(checkpoint, argv, code, message, capsys):
    assert main(["serve", checkpoint, "--port", "0", "--device", "cpu", *argv]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"glm5: error: {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--max-model-len 9999999", "--max-model-len: got 9999999; allowed: up to "),
        ("--tp 3", "--tensor-parallel-size: got 3, which does not divide "),
        ("--chat-template 7", "--chat-template: got '7'; allowed: glm-5, "),
        ("--device cuda:2", "--device: got cuda:2; torch finds 2 of them here; allowed here: auto, cpu, cuda, or "),
        ("--device cuda --tp 4", "--tensor-parallel-size: got 4, which needs 4 GPUs, and torch finds 2 here"),
        (
            "--max-num-batched-tokens 10",
            f"--max-num-batched-tokens: got 10; allowed: at least --max-num-seqs (64), {ALL}; raise it, or lower --max",
        ),
        (
            "--max-num-seqs 5000",
            f"--max-num-seqs: got 5000; allowed: up to --max-num-batched-tokens (2048), {ALL}; lower it, or give --max",
        ),
        (
            "--kv-offloading-size 1 --no-enable-prefix-caching",
            "--kv-offloading-size: got 1.0; allowed: none without --enable-prefix-caching: ",
        ),
        ("--kv-disk-dir /dev/null", "--kv-disk-dir: got '/dev/null', where nothing can be written (it is a file); "),
    ],
)
def test_what_needs_no_loaded_model_is_refused_before_the_start(checkpoint, line, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("glm5.serve.http.server.bind", lambda *_: pytest.fail("it started"))
    assert main(["serve", checkpoint, *line.split()]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"glm5: error: {message}")
    assert said.out == ""


def test_no_such_model(capsys):
    assert main(["serve", "no/such/model", "--port", "0"]) == 1
    assert "no/such/model: no such directory" in capsys.readouterr().err
