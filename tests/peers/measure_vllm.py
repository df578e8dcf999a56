"""`glm5 bench frontend` for vLLM's server: python -m tests.peers.measure_vllm PYTHON [--rust] [--max-concurrency ...]

PYTHON belongs to an environment with vLLM (no GPU is needed: torch for CPUs, and of vLLM's requirements those that its
front end imports). The server has the engine of `vllm_executor.py`, and the tokenizer and the chat template of ours.
"""

import argparse
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

from glm5.bench.frontend.run import drive, table
from glm5.chat.template import ChatTemplate
from glm5.checkpoint.init import write_weightless
from glm5.common.errors import GlmError
from glm5.config.bench_frontend import BenchFrontendConfig
from glm5.config.presets import preset

_START_S = 300
_CONFIG = {  # of a model that every version knows; no weights are read
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 320,
    "max_position_embeddings": 1 << 16,
    "dtype": "float32",
}
_FLAGS = "--distributed-executor-backend vllm_executor.ScriptedExecutor --no-enable-prefix-caching --host 127.0.0.1"


def main() -> None:
    """Print the table of one measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("--rust", action="store_true", help="vLLM's front end in Rust")
    parser.add_argument("--max-concurrency", type=int, default=64)
    parser.add_argument("--random-output-len", type=int, default=512)
    parser.add_argument("--step-rate", type=float, default=50)
    parser.add_argument("flags", nargs="*", help="more flags of `vllm serve`, after --")
    given = parser.parse_args()
    settings = BenchFrontendConfig(
        max_concurrency=given.max_concurrency,
        random_output_len=given.random_output_len,
        step_rate=given.step_rate,
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        model = write_weightless(preset("tiny"), Path(folder) / "tiny", fp8=False)
        (model / "config.json").write_text(json.dumps(_CONFIG))
        (model / "chat_template.jinja").write_text(ChatTemplate.bundled("glm-5.1").source)
        environment = os.environ | {
            "PYTHONPATH": str(Path(__file__).parent),
            "STEP_RATE": str(given.step_rate),
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_USE_RUST_FRONTEND": str(int(given.rust)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        limits = ["--max-num-seqs", str(given.max_concurrency), "--max-num-batched-tokens", str(1 << 16)]
        command = [given.python, "-m", "vllm.entrypoints.cli.main", "serve", str(model), "--port", str(port)]
        command += [*_FLAGS.split(), *limits, *given.flags]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as server:
            try:
                _wait(server, port)
                print(table(drive(settings, "127.0.0.1", port, lambda: _processor_time(server.pid))))
            finally:
                server.terminate()


def _wait(server: "subprocess.Popen[bytes]", port: int) -> None:
    until = time.monotonic() + _START_S
    while server.poll() is None and time.monotonic() < until:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise GlmError("vLLM's server does not answer; what it said is above")


def _processor_time(pid: int) -> float:
    """Seconds of the server's processes without the engine's."""
    root = psutil.Process(pid)
    front = [each for each in (root, *root.children(recursive=True)) if not each.name().startswith("VLLM::Engine")]
    return sum(sum(each.cpu_times()[:2]) for each in front)


if __name__ == "__main__":
    main()
