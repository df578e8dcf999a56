"""Episodes over HTTP: what is asked, how answers are read, and what a server that fails costs."""

import asyncio
import json

import httpx2
import pytest

from glm5.common.errors import GlmError
from glm5.post_train.served import NAME, _Client, _counters
from glm5.rl.environments.table import make
from glm5.rl.rollouts.collect import Draw


class Workers:
    """Episodes in this process."""

    def __init__(self, name):
        self.environment = make(name)

    async def task(self, _, seed, level):
        return self.environment.task(seed, level)

    async def reset(self, task):
        episode = self.environment.reset(task)

        class Remote:
            messages = episode.messages

            async def step(self, reply):
                return episode.step(reply)

            async def __aenter__(self):
                return self

            async def __aexit__(self, *_):
                episode.close()

        return Remote()


def played(plan, environment, answer, seed=0):
    """The reward of one episode; `answer(body)` is (status, body) of the server."""
    client = _Client.__new__(_Client)
    client.recipe, client.url, client.num_tokens, client.workers = plan().recipe, "http://x", 0, Workers(environment)
    asked = []

    def handle(request):
        asked.append(json.loads(request.content))
        status, body = answer(asked[-1])
        return httpx2.Response(status, json=body)

    async def play():
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(handle), base_url="http://x") as client.http:
            return await client._play(Draw(0, environment, seed, 0))

    return asyncio.run(play()), asked, client


def said(content, reason="stop"):
    return 200, {
        "choices": [{"message": {"content": content}, "finish_reason": reason}],
        "usage": {"completion_tokens": 3},
    }


def test_a_conversation_goes_on_until_the_environment_ends_it(plan):
    task = make("guess").task(0, 0)
    replies = iter([reply.content for reply in make("guess").oracle(task)])
    reward, asked, client = played(plan, "guess", lambda _: said(next(replies)))
    assert reward == 1.0
    assert [len(body["messages"]) for body in asked] == [1, 3, 5, 7]
    assert asked[1]["messages"][1] == {"role": "assistant", "content": "8"}
    assert asked[0]["model"] == NAME
    assert (asked[0]["temperature"], asked[0]["max_tokens"]) == (0.0, 8)
    assert client.num_tokens == 12


def test_a_reply_that_ran_out_of_tokens_is_truncated(plan):
    assert played(plan, "guess", lambda _: said("1", "length"))[0] == 0.0
    assert played(plan, "guess", lambda _: said("1"))[0] == 1.0


def test_a_full_context_earns_nothing_and_another_error_ends_the_measurement(plan):
    full = {"error": {"message": "longer than the context"}}
    reward, asked, _ = played(plan, "guess", lambda _: (400, full))
    assert (reward, ["max_tokens" in body for body in asked]) == (0.0, [True, False])
    assert played(plan, "guess", lambda body: (400, full) if "max_tokens" in body else said("1"))[0] == 1.0
    with pytest.raises(GlmError, match=r"the server answered 500: .*broken"):
        played(plan, "guess", lambda _: (500, {"error": "broken"}))


def test_counters_of_drafts_are_summed():
    text = """# HELP vllm:spec_decode_num_drafts_total Steps
vllm:spec_decode_num_drafts_total{model_name="a"} 40.0
vllm:spec_decode_num_draft_tokens_total{model_name="a"} 80
vllm:spec_decode_num_accepted_tokens_total{model_name="a"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="a",position="0"} 30.0
"""
    assert _counters(text) == {"drafted": [40.0], "accepted": [30.0]}
    assert _counters("") == {"drafted": [0], "accepted": [0]}
