"""Admin routes on a real engine, each by what can be seen of it from outside."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from glm5.checkpoint.save import save
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.serve.http.server import bind, serving
from tests.support.models import random_model
from tests.support.serving import CHAT, SECONDS, bearer, key, make_app
from tests.support.tokenizers import tiny_tokenizer

LONG = "the quick brown fox jumps over the lazy dog " * 8
ASK = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def http():
    llm = LLM(random_model(11), tiny_tokenizer(), max_num_seqs=4)
    with AsyncEngine(llm) as engine:
        app = make_app(engine, key("boss", role="admin"))
        with serving(app, engine, bind("127.0.0.1", 0)) as url, httpx.Client(base_url=url, timeout=SECONDS) as http:
            http.headers.update(bearer("boss"))
            yield http


def admin(http, path, **settings) -> dict:
    answer = http.post(path, json=settings)
    assert answer.status_code == 200, answer.text
    return answer.json()


def answered(http, **more) -> dict:
    answer = http.post(CHAT, json=ASK | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(answer) -> str:
    message = answer["choices"][0]["message"]
    return (message["reasoning_content"] or "") + (message["content"] or "")


def cached(answer) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_flushing_forgets_prompts(http):
    answered(http)
    assert cached(answered(http)) >= 64
    admin(http, "/flush_cache")
    assert cached(answered(http)) == 0


@pytest.mark.parametrize(
    ("down", "up"),
    [
        ("/sleep", "/wake_up"),
        ("/release_memory_occupation", "/resume_memory_occupation"),
    ],
)
def test_asleep_it_gives_its_memory_back_and_requests_wait(http, down, up):
    before = text_of(answered(http))
    assert admin(http, down)["freed_bytes"] > 0
    assert http.get("/health").status_code == 200
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(answered, http)
        while 'num_requests_waiting{model_name="tiny",engine="0"} 1' not in http.get("/metrics").text:
            assert not waiting.done()
        admin(http, up)
        after = waiting.result(SECONDS)
    assert text_of(after) == before
    assert cached(after) == 0  # what was cached lay in the memory that was given back


def test_a_pause_in_place_and_one_that_ends_what_runs(http):
    whole = text_of(answered(http, max_tokens=40))
    admin(http, "/pause_generation", mode="in_place")
    with ThreadPoolExecutor(1) as pool:
        paused = pool.submit(answered, http, max_tokens=40)
        while 'num_requests_waiting{model_name="tiny",engine="0"} 1' not in http.get("/metrics").text:
            assert not paused.done()
        admin(http, "/continue_generation")
        assert text_of(paused.result(SECONDS)) == whole
    with http.stream("POST", CHAT, json=ASK | {"max_tokens": None, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines)
        admin(http, "/pause_generation")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    admin(http, "/continue_generation")
    assert text_of(answered(http, max_tokens=40)) == whole


def test_other_weights_give_other_answers(http, tmp_path):
    before = text_of(answered(http))
    for seed in (11, 12):
        save(random_model(seed), tmp_path / str(seed))
    version = admin(http, "/update_weights_from_disk", model_path=str(tmp_path / "12"))["weight_version"]
    changed = answered(http)
    assert text_of(changed) != before
    assert cached(changed) == 0
    assert f'glm5:weight_version{{model_name="tiny",engine="0"}} {version}' in http.get("/metrics").text
    again = admin(http, "/update_weights_from_disk", model_path=str(tmp_path / "11"), weight_version=version + 5)
    assert again["weight_version"] == version + 5
    assert text_of(answered(http)) == before


def versions(http) -> list[str]:
    answer = http.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}})
    info = http.get("/get_model_info").json(), http.get("/get_weight_version").json()
    return [reported["weight_version"] for reported in (answer.json()["meta_info"], *info)]


def test_weights_are_called_as_whoever_loads_them_says(http, tmp_path):
    """SGLang's versions are texts; the same one may come again."""
    save(random_model(11), tmp_path)
    for name in ("step-12", "3", "step-12", "\u00fc"):
        reported = admin(http, "/update_weights_from_disk", model_path=str(tmp_path), weight_version=name)
        assert reported["weight_version"] == name
        assert versions(http) == [name] * 3
    number = admin(http, "/update_weights_from_disk", model_path=str(tmp_path))["weight_version"]
    assert versions(http) == [str(number)] * 3


@pytest.mark.parametrize("path", ["/nowhere", "", "~nobody-has-this-name/w", "a\x00b", "x" * 5000])
def test_weights_that_cannot_be_read_change_nothing(http, path):
    before = text_of(answered(http))
    answer = http.post("/update_weights_from_disk", json={"model_path": path})
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert message
    assert path != "/nowhere" or message.startswith("/nowhere: no such directory")
    assert text_of(answered(http)) == before
