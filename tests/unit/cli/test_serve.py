"""`glm5 serve` as a process: what it prints, that it answers, and that signals end it cleanly."""

import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import pytest

from glm5.cli.main import main

SECONDS = 60  # an upper limit for what takes a few
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
    ("argv", "code", "message"),
    [
        (["--max-model-len", "9999999"], 1, "max_model_len: got 9999999; allowed: up to "),
        (["--chat-template", "7"], 1, "chat template '7' is neither a bundled one"),
        (["--generation-config", "/nowhere"], 1, "generation_config: got /nowhere; allowed: auto, vllm, or a folder"),
        (["--host", "\udcff"], 2, "--host: got '\\udcff'; allowed: a text in valid Unicode"),
        (["--host", ""], 2, "--host: got ''; allowed: a text that is not empty"),
        (["--speculative-config", "[" * 100_000], 2, "--speculative-config: got '[[["),
        (["--speculative-config", "9" * 5000], 2, "--speculative-config: got '999"),
        (["--host", "256.1.1.1"], 1, "cannot listen on 256.1.1.1 port 0: "),
        (["--device", "cuda:7"], 1, "device: got cuda:7; allowed: "),
        (["--max-num-batched-tokens", "10"], 2, "--max-num-batched-tokens: got '10'; allowed: at least max_num_seqs ("),
        (["--max-num-seqs", "5000"], 2, "--max-num-batched-tokens: got 2048; allowed: at least max_num_seqs (5000)"),
        (["--otlp-traces-endpoint", "x:4318"], 2, "--otlp-traces-endpoint: got 'x:4318'; allowed: an address "),
    ],
)
def test_what_cannot_be_honoured_is_one_line(checkpoint, argv, code, message, capsys):
    assert main(["serve", checkpoint, "--port", "0", "--device", "cpu", *argv]) == code
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"glm5: error: {message}")


def test_no_such_model(capsys):
    assert main(["serve", "no/such/model", "--port", "0"]) == 1
    assert "no/such/model: no such directory" in capsys.readouterr().err
