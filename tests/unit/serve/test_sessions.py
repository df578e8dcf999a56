"""Sessions: what agents were asked and what was sampled, token by token, whatever their clients make of it."""

from contextlib import contextmanager
from itertools import pairwise
from random import Random
from threading import Thread

import httpx
import pytest

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.config.serve import ServeConfig
from glm5.rl.gateway.session import Ruled, Session
from glm5.rl.segments import Segment
from glm5.serve.app import create_app
from glm5.serve.gateway import gateway
from glm5.serve.http.keys import KeyRing, plain_keys
from glm5.serve.http.server import bind, serving
from tests.support.agents import DIALECTS, Agent, RandomEngine
from tests.support.tokenizers import tiny_tokenizer

NUM_AGENTS, TURNS = 5, 8
MANY = 700  # of each dialect


@contextmanager
def recording(seed: int, template: str = "glm-5.2", **settings):
    tokenizer = tiny_tokenizer()
    engine = RandomEngine(tokenizer, seed)
    config = ServeConfig.model_validate(
        {"model": "org/tiny", "served_model_name": ("tiny",), "max_sessions": 10_000, **settings}
    )
    keys = KeyRing(plain_keys(config.api_key, "user", "key"))
    app = create_app(engine, ChatTemplate.bundled(template, tokenizer), tokenizer, config, keys=keys)
    with serving(app, engine, bind("127.0.0.1", 0)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client, engine


def sampled_of(shown: dict) -> list[tuple]:
    """(prompt, tokens, log-probabilities, versions) of every sampled segment, from the tree as it is shown."""
    segments = shown["segments"]

    def path(index: int | None) -> list[int]:
        return [] if index is None else path(segments[index]["parent"]) + segments[index]["token_ids"]

    return [
        (path(one["parent"]), one["token_ids"], one["logprobs"], one["versions"]) for one in segments if one["sampled"]
    ]


def play(client, engine, name: str, dialect: str, random: Random, turns: int = TURNS) -> tuple[Agent, dict, list]:
    before = len(engine.said)
    agent = Agent(client, name, dialect, random, by_path=random.random() < 0.5)
    agent.run(turns)
    return agent, client.delete(f"/sessions/{name}").json(), engine.said[before:]


def check(shown: dict, said: list) -> None:
    """Every answer is in the tree as it was sampled, once, after exactly the prompt that the engine saw."""
    found = sampled_of(shown)
    assert sorted(found) == sorted(said)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("num_agents", [NUM_AGENTS, pytest.param(MANY, marks=pytest.mark.long)])
def test_what_is_kept_is_what_was_sampled(dialect, num_agents, seed):
    with recording(seed) as (client, engine):
        for number in range(num_agents):
            random = Random(seed * 1000 + number)
            agent, shown, said = play(client, engine, f"{dialect}-{number}", dialect, random)
            check(shown, said)
            assert shown["forks"] <= agent.num_branches, "a fork that nobody asked for"


class Linear(Agent):
    """Keeps its history as it was."""

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.history += self._read(self.ask())


def linear(seed: int) -> dict:
    """The tree of one agent that only goes on."""
    with recording(seed) as (client, _):
        Linear(client, "a", "chat", Random(seed), by_path=True).run(TURNS)
        return client.get("/sessions/a").json()


def test_a_conversation_is_one_sequence(seed):
    shown = linear(seed)
    assert shown["forks"] == 0
    assert [one["parent"] for one in shown["segments"]] == [None, *range(2 * TURNS - 1)]
    assert not any(one["abandoned"] for one in shown["segments"])


def test_who_tokenizes_again_does_not_keep_what_was_sampled(seed, monkeypatch):
    """The control: the whole history is rendered for each request, as servers do."""
    begins = Session._begins
    monkeypatch.setattr(Session, "_goes_on", lambda self, after, messages, has_tools, options: again(self))
    asked = []

    def placed(self, messages, tools, options):
        asked[:] = [messages, tools, options]
        return place(self, messages, tools, options)

    def again(self):
        return begins(self, *asked)

    place = Session.place
    monkeypatch.setattr(Session, "place", placed)
    shown = linear(seed)
    assert shown["forks"] == TURNS - 1
    found = sampled_of(shown)
    kept = [later[: len(prompt) + len(ids)] == prompt + ids for (prompt, ids, *_), (later, *_) in pairwise(found)]
    assert not all(kept)


def ask(client, text: str, name: str = "a", **fields) -> dict:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    response = client.post(f"/sessions/{name}/v1/chat/completions", json=body)
    return response.json()


def test_answers_of_one_request_are_siblings(seed):
    with recording(seed) as (client, engine):
        ask(client, "hi")
        ask(client, "hi")  # asked again: the first answer led to nothing
        shown = client.get("/sessions/a").json()
    assert [one["parent"] for one in shown["segments"]] == [None, 0, 0]
    assert [one["abandoned"] for one in shown["segments"]] == [False, True, False]
    assert len(engine.said) == 2


@pytest.mark.parametrize("keeps_pages", [True, False])
def test_a_trainer_decides_whether_a_sessions_pages_outlive_pushes(seed, keeps_pages):
    tokenizer = tiny_tokenizer()
    engine, template = RandomEngine(tokenizer, seed), ChatTemplate.bundled("glm-5.2", tokenizer)
    with gateway(template, tokenizer, environment={}) as opened:
        url = opened.begin("a", Ruled({}, {}, 64, 5, keeps_pages), engine)
        headers = {"Authorization": f"Bearer {opened.key}"}
        with httpx.Client(base_url=url.removesuffix("/sessions/a"), headers=headers, timeout=60) as client:
            ask(client, "hi", cache_salt="the agent's")
        assert opened.end("a").tree.num_sampled
    assert engine.options["keeps_pages"] == keeps_pages
    assert engine.options["cache_salt"].endswith("/5" if keeps_pages else "/the agent's")


def test_a_gateway_asks_the_engine_that_a_session_was_begun_with(seed):
    tokenizer = tiny_tokenizer()
    engines = {name: RandomEngine(tokenizer, seed) for name in ("a", "b")}
    with gateway(ChatTemplate.bundled("glm-5.2", tokenizer), tokenizer, environment={}) as opened:
        urls = {name: opened.begin(name, Ruled({}, {}, 64, 5), engine) for name, engine in engines.items()}
        headers = {"Authorization": f"Bearer {opened.key}"}
        with httpx.Client(base_url=urls["a"].removesuffix("/sessions/a"), headers=headers, timeout=60) as client:
            for name in ("a", "b", "b"):
                assert "choices" in ask(client, "hi" * 10_000 * (name == "a") or "hi", name)  # long ones by a thread
            sampled = {name: opened.end(name).tree.num_sampled for name in engines}
            for name in ("a", "c"):
                assert "is of no session that goes on" in ask(client, "hi", name)["error"]["message"]
    assert [len(engine.said) for engine in engines.values()] == [1, 2]
    assert sampled == {name: sum(len(ids) for _, ids, *_ in engine.said) for name, engine in engines.items()}


def test_an_agent_cannot_end_the_session_of_its_trainer(seed):
    """Which would ask on without the trainer's rules, and end the run."""
    tokenizer = tiny_tokenizer()
    with gateway(ChatTemplate.bundled("glm-5.2", tokenizer), tokenizer, environment={}) as opened:
        url = opened.begin("a", Ruled({}, {}, 64, 5), RandomEngine(tokenizer, seed))
        refused = httpx.delete(url, headers={"Authorization": f"Bearer {opened.key}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_yours")
        assert opened.end("a").ruled is not None


def test_a_begun_reply_is_a_conversation_of_its_own(seed):
    with recording(seed) as (client, engine):
        begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I say"}]
        fields = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
        response = client.post("/sessions/a/v1/chat/completions", json=fields)
        assert response.status_code == 200
        check(client.get("/sessions/a").json(), engine.said)


def test_sessions_end_and_are_bounded(seed):
    with recording(seed, max_sessions=1, max_session_tokens=300) as (client, _):
        assert "choices" in ask(client, "hi")
        refused = ask(client, "hi", name="b")["error"]["message"]
        assert refused == (
            "the server keeps 1 sessions, which is all that --max-sessions allows; end one with DELETE /sessions/NAME"
        )
        full = [ask(client, f"hi {number}") for number in range(30)][-1]["error"]["message"]
        assert "more exceed 300; end it, and begin another" in full
        assert client.delete("/sessions/a").status_code == 200
        assert client.get("/sessions/a").status_code == 404
        assert "choices" in ask(client, "hi", name="b")


def test_a_server_that_keeps_none_says_so(seed):
    with recording(seed, max_sessions=0) as (client, _):
        assert "start it with --max-sessions" in client.get("/sessions/a").json()["error"]["message"]
        assert "start it with --max-sessions" in ask(client, "hi")["error"]["message"]


@pytest.mark.parametrize("name", ["a b", "%00", "%C3%BC"])
def test_a_name_that_cannot_be_kept_is_refused(name, seed):
    """Else the agent would not be recorded, and nobody told."""
    with recording(seed) as (client, engine):
        assert "allowed: 1 to 128 printable ASCII characters" in ask(client, "hi", name=name)["error"]["message"]
        assert not engine.said


def test_tenants_do_not_see_each_other(seed):
    with recording(seed, "glm-5.2", api_key=("one", "two")) as (client, _):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for name in ("one", "two"):
            path = "/sessions/a/v1/chat/completions"
            assert client.post(path, json=body, headers={"Authorization": f"Bearer {name}"}).status_code == 200
        shown = client.get("/sessions/a", headers={"Authorization": "Bearer two"}).json()
        assert sum(one["sampled"] for one in shown["segments"]) == 1
        assert client.get("/sessions/a").status_code == 401
        assert client.post("/sessions/a/sleep", headers={"Authorization": "Bearer one"}).status_code == 403


def complete(client, prompt, **fields) -> str:
    body = {"prompt": prompt, "max_tokens": 500, **fields}
    response = client.post("/sessions/a/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_completions_go_on_from_what_was_sampled(seed):
    """By their tokens, or by their text with the end that was sampled; only what is new is tokenized."""
    with recording(seed) as (client, engine):
        text = "Once upon a time"
        for number in range(4):
            text += complete(client, text) + engine.tokenizer.decode(engine.said[-1][1][-1:]) + f" and then {number}"
        whole = [*engine.said[-1][0], *engine.said[-1][1]]
        complete(client, [*whole, 5, 6, 7])
        complete(client, whole)  # nothing new: after the reply itself
        shown = client.get("/sessions/a").json()
        check(shown, engine.said)
        assert shown["forks"] == 0
        assert engine.said[-1][0] == whole
        assert [one["parent"] for one in shown["segments"]] == [None, 0, 1, 2, 3, 4, 5, 6, 7, 8, 7]


def test_a_completion_without_the_end_of_a_reply_begins_anew_with_its_tokens(seed):
    with recording(seed) as (client, engine):
        text = "Once upon a time"
        text += complete(client, text) + " and then"
        complete(client, text)
        shown = client.get("/sessions/a").json()
        check(shown, engine.said)
        (prompt, ids, *_), (again, *_) = engine.said
        assert again[: len(prompt) + len(ids) - 1] == prompt + ids[:-1]
        assert shown["forks"] == 1
        # The control: another beginning has nothing in common, and a conversation is no completion.
        complete(client, "It was a dark night")
        ask(client, "Once upon a time")
        assert client.get("/sessions/a").json()["forks"] == 3


def test_several_completions_in_one_request_are_branches(seed):
    with recording(seed) as (client, _):
        body = {"prompt": ["one", "two"], "n": 1, "max_tokens": 500}
        for changes in ({}, {"max_tokens": 0, "logprobs": 0}):  # the second one is no answer
            assert client.post("/sessions/a/v1/completions", json=body | changes).status_code == 200
        shown = client.get("/sessions/a").json()
        assert sum(one["sampled"] for one in shown["segments"]) == 2


def test_answers_of_one_request_do_not_abandon_each_other(seed):
    """Those of the same prompt in a batch; the same asked again later does. Of n answers of a prompt see below."""
    with recording(seed) as (client, _):

        def asked(**fields) -> list[tuple[int | None, bool]]:
            body = {"max_tokens": 500, **fields}
            assert client.post("/sessions/a/v1/completions", json=body).status_code == 200
            shown = client.get("/sessions/a").json()
            return [(one["parent"], one["abandoned"]) for one in shown["segments"]]

        assert asked(prompt=["one", "one", "one"]) == [(None, False), *[(0, False)] * 3]
        assert asked(prompt="one") == [(None, False), *[(0, True)] * 3, (0, False)]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
def test_in_a_session_the_model_has_any_name(seed, path):
    body = {"model": "claude-sonnet-9", "max_tokens": 500}
    body |= {"prompt": "hi"} if path == "completions" else {"messages": [{"role": "user", "content": "hi"}]}
    if path == "responses":
        body = {"model": "gpt-9-codex", "input": "hi"}
    with recording(seed) as (client, _):
        answer = client.post(f"/sessions/a/v1/{path}", json=body)
        assert (answer.status_code, answer.json()["model"]) == (200, body["model"])
        assert client.post(f"/v1/{path}", json=body, headers={"X-Session-ID": "b"}).status_code == 200
        refused = client.post(f"/v1/{path}", json=body)  # the control
        assert refused.status_code == 404
        assert "does not exist; allowed: tiny" in refused.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"max_tokens": 10**9}, {"logit_bias": {"x": 1}}, {"stop": 5}])
def test_a_refused_request_leaves_nothing(seed, fields):
    with recording(seed, max_sessions=1, max_session_tokens=600) as (client, engine):
        for number in range(30):  # together more than the session holds
            path, text = f"/sessions/{number % 2}/v1", f"Once upon a time there was number {number}"
            for route, asked in (
                ("completions", {"prompt": [text, text]}),
                (
                    "chat/completions",
                    {"messages": [{"role": "user", "content": text}]},
                ),
            ):
                assert client.post(f"{path}/{route}", json=asked | fields).status_code in (400, 422)
                assert client.get(f"/sessions/{number % 2}").status_code == 404
        complete(client, "Once upon a time")
        shown = client.get("/sessions/a").json()
        check(shown, engine.said)
        assert shown["forks"] == 0
        assert len(shown["segments"]) == 2


def test_the_same_asked_at_once_has_one_context(seed):
    tokenizer = tiny_tokenizer()
    session = Session(ChatTemplate.bundled("glm-5.2", tokenizer), 1000)
    places = [session.place([{"role": "user", "content": "hi"}], None, {}) for _ in range(2)]
    places += [session.place_text("hi", tokenizer) for _ in range(2)]
    for placed in [*places, places[1]]:  # the last one has two answers
        session.add(placed, {"role": "assistant", "content": ""}, Segment([5], None, True, [0.0], [0]))
    assert [one.parent for one in session.tree.segments] == [None, 0, 0, None, 3, 3, 0]
    assert (session.abandoned(), session.num_forks) == ({1, 4}, 1)
    assert session.trained().num_sampled == 3


def test_a_text_that_splits_a_character_of_a_reply_begins_anew():
    """The reply has two bytes of three; a client may write the whole character, whose rest is no text."""
    tokenizer = tiny_tokenizer()
    of_byte = {tokenizer.bytes_of(token): token for token in range(tokenizer.vocab_size)}
    begun, ended = [of_byte[bytes([one])] for one in "€".encode()[:2]], of_byte["€".encode()[2:]]
    session = Session(ChatTemplate.bundled("glm-5.2", tokenizer), 1000)
    placed = session.place_text("a", tokenizer)
    session.add(placed, {"role": "assistant", "content": ""}, Segment([*begun], None, True, [0.0] * 2, [0] * 2))
    anew = session.place_text("a€", tokenizer)
    assert anew.ids == tokenizer.encode("a€")
    # The control: as tokens it goes on from the reply.
    whole = [*placed.ids, *begun, ended, 5]
    after = session.place_text(whole, tokenizer)
    assert after.ids == whole
    for one in (anew, after):
        session.add(one, {"role": "assistant", "content": ""}, Segment([6], None, True, [0.0], [0]))
    assert [one.parent for one in session.tree.segments] == [None, 0, None, 2, 1, 4]


def test_a_retry_after_a_reply_abandons_the_first_answer(seed):
    """A completion that has nothing new goes on from the reply itself, so that its answers are the reply's children."""
    with recording(seed) as (client, engine):
        complete(client, [5, 6, 7])
        whole = [*engine.said[-1][0], *engine.said[-1][1]]
        for _ in range(2):
            complete(client, whole)
        shown = client.get("/sessions/a").json()
        assert [(one["parent"], one["abandoned"]) for one in shown["segments"]] == [
            (None, False),
            (0, False),
            (1, True),
            (1, False),
        ]


def test_a_session_answers_others_while_a_long_prompt_is_encoded(monkeypatch):
    """The server's loop asks the session, too: a long prompt of one agent held up the requests of all."""
    tokenizer = tiny_tokenizer()
    session = Session(ChatTemplate.bundled("glm-5.2", tokenizer), 1000, Ruled({}, {}, 64, 5))
    encode, answered = Tokenizer.encode, []

    def encode_and_ask(self, text, **options):
        asking = Thread(target=session.asked, args=(None,), daemon=True)
        asking.start()
        asking.join(2)
        answered.append(not asking.is_alive())
        return encode(self, text, **options)

    messages = [{"role": "user", "content": "hi"}]
    placed = session.place(messages, None, {})
    session.add(placed, {"role": "assistant", "content": "ho"}, Segment([5], None, True, [0.0], [0]))
    monkeypatch.setattr(Tokenizer, "encode", encode_and_ask)
    session.place([*messages, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "more"}], None, {})
    assert len(answered) >= 1
    session.place([{"role": "user", "content": "another"}], None, {})
    session.place_text("a text", tokenizer)
    assert len(answered) >= 3
    assert all(answered)
