"""vLLM's small routes, SageMaker's probe, and the models' cards."""

import anthropic
import openai
import pytest

from glm5 import __version__
from tests.support import engines
from tests.support.serving import bearer, key, scripted, served


@pytest.fixture(scope="module")
def server():
    engine = scripted()
    with served(engine, key("alice"), served_model_name=("tiny", "alias")) as http:
        yield http, engine


def test_version(server):
    http, _ = server
    assert http.get("/version").status_code == 401
    assert http.get("/version", headers=bearer("alice")).json() == {"version": __version__}


@pytest.mark.parametrize("sleeps", [True, False])
def test_whether_the_engine_sleeps(server, monkeypatch, sleeps):
    http, _ = server
    monkeypatch.setitem(engines.SCRIPTED_STATS, "is_sleeping", sleeps)
    assert http.get("/is_sleeping", headers=bearer("alice")).json() == {"is_sleeping": sleeps}


def test_sagemaker_s_probe_is_open_to_all(server, monkeypatch):
    http, engine = server
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200
    monkeypatch.setattr(engine, "stopped_because", "its process was killed")
    for answer in (http.get("/ping"), http.post("/ping")):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_stopped")


def test_cards_are_read_by_both_clients(server):
    http, _ = server
    url, names = str(http.base_url).rstrip("/"), ["tiny", "alias"]
    page = anthropic.Anthropic(base_url=url, api_key="alice").models.list()
    assert [(card.id, card.type, card.display_name) for card in page.data] == [(n, "model", n) for n in names]
    assert page.data[0].created_at.timestamp() > 0
    assert [page.first_id, page.last_id, page.has_more] == [*names, False]
    cards = openai.OpenAI(base_url=f"{url}/v1", api_key="alice").models.list().data
    assert [(card.id, card.object, card.owned_by) for card in cards] == [(name, "model", "glm5") for name in names]
