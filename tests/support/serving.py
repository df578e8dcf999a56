"""A server around a scripted engine, with settings, keys and a state of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from glm5.chat.template import ChatTemplate
from glm5.config.serve import ServeConfig
from glm5.serve.app import create_app
from glm5.serve.http.keys import Key, KeyRing, hash_of
from glm5.serve.http.server import bind, serving
from tests.support.engines import ScriptedEngine
from tests.support.tokenizers import tiny_tokenizer

SECONDS = 20  # an upper limit for what takes milliseconds
ASK = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


def scripted(script: str = "</think>yes") -> ScriptedEngine:
    """An engine that answers this."""
    engine = ScriptedEngine(tiny_tokenizer())
    engine.script = script
    return engine


def key(text: str, **fields: object) -> Key:
    """A key by its text, which is its name too unless `fields` say otherwise."""
    return Key.model_validate({"name": text, "sha256": hash_of(text), **fields})


def bearer(text: str) -> dict[str, str]:
    """The header that shows a key."""
    return {"Authorization": f"Bearer {text}"}


def make_app(engine, *keys: Key, state=None, **settings):
    """The application, for a server or to look at."""
    tokenizer = tiny_tokenizer()
    config = ServeConfig.model_validate({"model": "org/tiny", "served_model_name": ("tiny",), **settings})
    template = ChatTemplate.bundled("glm-5.1", tokenizer)
    return create_app(engine, template, tokenizer, config, keys=KeyRing(keys), state=state)


@contextmanager
def served(engine, *keys: Key, state=None, **settings) -> Iterator[httpx.Client]:
    """A client of a server around `engine`."""
    app = make_app(engine, *keys, state=state, **settings)
    with (
        serving(app, engine, bind("127.0.0.1", 0)) as url,
        httpx.Client(base_url=url, timeout=SECONDS) as client,
    ):
        yield client
