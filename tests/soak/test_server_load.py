"""A server under many clients, a tenth of which leave: the others get whole answers, and nothing is left behind."""

import asyncio
import json

import httpx
import pytest

from glm5.chat.template import ChatTemplate
from glm5.config.serve import ServeConfig
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.serve.app import create_app
from glm5.serve.server import bind, serving
from tests.support.engines import assert_nothing_left
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.slow

NUM_WAVES, CLIENTS_A_WAVE, LEAVING = 5, 80, 10
MAX_TOKENS = 24
TIMEOUT = 300  # seconds; a wave takes a few


async def ask(client: httpx.AsyncClient, number: int) -> int | None:
    """Tokens of a whole streamed answer, or None for a client that left after the first."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"question {number}"}],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line:
                continue
            events.append(line.removeprefix("data: "))
            if number % LEAVING == 0:
                return None
    assert events[-1] == "[DONE]"
    return json.loads(events[-2])["usage"]["completion_tokens"]


async def waves(url: str) -> list[int | None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT, limits=limits) as client:
        answers: list[int | None] = []
        for wave in range(NUM_WAVES):
            numbers = range(wave * CLIENTS_A_WAVE, (wave + 1) * CLIENTS_A_WAVE)
            answers += await asyncio.gather(*(ask(client, number) for number in numbers))
        return answers


def test_load():
    tokenizer = tiny_tokenizer()
    llm = LLM(random_model(11), tokenizer, max_num_seqs=16)
    config = ServeConfig(model="org/tiny", served_model_name=("tiny",))
    with AsyncEngine(llm) as engine:
        app = create_app(engine, ChatTemplate.bundled("glm-5.1", tokenizer), tokenizer, config)
        with serving(app, engine, bind("127.0.0.1", 0)) as url:
            answers = asyncio.run(waves(url))
            assert httpx.get(url + "/health").status_code == 200
    assert answers.count(None) == NUM_WAVES * CLIENTS_A_WAVE // LEAVING
    assert set(answers) == {None, MAX_TOKENS}
    assert_nothing_left(llm)
