"""The dashboard before the real application and a random model: its figures are there, and right."""

import httpx
import pytest

from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from tests.browser.real import application
from tests.browser.scripted import EMPTY
from tests.browser.test_dashboard import CLOCK, NONE, table
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def model_url():
    llm = LLM(random_model(11), tiny_tokenizer(), max_num_seqs=4)
    with AsyncEngine(llm) as engine, application(engine) as url:
        yield url


def test_the_dashboard_has_every_figure_from_the_server(page, model_url):
    """Nothing is "not reported", and what is counted is what was asked for."""
    page.forget(model_url + EMPTY)
    page.add_script(CLOCK)
    page.open(f"{model_url}/dashboard")
    page.wait("document.querySelector('#updated').textContent")
    messages = [{"role": "user", "content": "the answer is " * 20}]
    body = {"messages": messages, "max_tokens": 8, "ignore_eos": True}
    for second in range(4):
        prompts = httpx.post(f"{model_url}/v1/chat/completions", json=body, timeout=60).json()["usage"]["prompt_tokens"]
        page.run("await clock.turn(1)")
        assert page.text("#status") == "Live", second
    found = table(page)
    # Three seconds before, one request a second.
    assert found["Generation, generated"] == "8"
    assert found["Prompts, prompt"] == f"{prompts}"
    assert {name for name, text in found.items() if text == NONE} == set()
    assert found["Prefix cache, host"] == found["Prefix cache, disk"] == "0 %"
    assert found["Prefix cache, device"] == found["Prefix cache, any tier"] != "0 %"
    assert "Speculation, 1" in found
    assert set(page.texts(".note")) == {""}
    assert page.text("#model") == "tiny"
