"""Running servers on free ports: one with a scripted engine, one with a random model."""

import queue
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest

from glm5.chat.template import ChatTemplate
from glm5.config.presets import preset
from glm5.config.serve import ServeConfig
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.serve.app import create_app
from glm5.serve.http.server import bind, serving
from tests.support.engines import ScriptedEngine
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer

CONFIG = ServeConfig(model="org/tiny", served_model_name=("tiny", "alias"))


def run_app(engine, listener=None):
    tokenizer = tiny_tokenizer()
    template = ChatTemplate.bundled("glm-5.1", tokenizer)
    return serving(create_app(engine, template, tokenizer, CONFIG), engine, listener or bind("127.0.0.1", 0))


@pytest.fixture(scope="package")
def scripted_server():
    engine = ScriptedEngine(tiny_tokenizer())
    with run_app(engine) as url:
        yield url, engine


@pytest.fixture
def engine(scripted_server):
    """The scripted engine, as new."""
    engine = scripted_server[1]
    engine.__init__(engine.tokenizer)
    return engine


@pytest.fixture
def http(scripted_server, engine):
    with httpx.Client(base_url=scripted_server[0], timeout=20) as client:
        yield client


@pytest.fixture(scope="package")
def model_server():
    """The tiny random model, with its whole context of 1024 tokens; the tokenizer's end tokens end its answers."""
    cfg = preset("tiny").replace(eos_token_id=tiny_tokenizer().eos_ids)
    llm = LLM(random_model(11, cfg), tiny_tokenizer(), max_num_seqs=4)
    with AsyncEngine(llm) as engine, run_app(engine) as url:
        yield url, engine


@pytest.fixture
def collector():
    """Of traces: (address, what came there)"""
    came = queue.Queue()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            came.put((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", came
        server.shutdown()
        thread.join()
