"""OpenAI's own client against a running server on a seeded `nano`: everything that people do with it."""

import asyncio
import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

from glm5.config.presets import preset
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from tests.support.engines import assert_nothing_left
from tests.support.models import random_model
from tests.support.tokenizers import tiny_tokenizer
from tests.unit.serve.conftest import run_app

ASK = [{"role": "user", "content": "the weather in Paris"}]
SHORT = {"model": "tiny", "max_completion_tokens": 12, "seed": 3}
BUDGET = {"thinking_token_budget": 4}


@pytest.fixture(scope="module")
def nano():
    cfg = preset("nano").replace(eos_token_id=tiny_tokenizer().eos_ids)
    llm = LLM(random_model(7, cfg), tiny_tokenizer(), max_num_seqs=4)
    with AsyncEngine(llm) as engine, run_app(engine) as url:
        yield url, llm
    assert_nothing_left(llm)


@pytest.fixture(scope="module")
def client(nano):
    with openai.OpenAI(base_url=nano[0] + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def test_chat_and_its_stream_are_the_same(client):
    whole = client.chat.completions.create(messages=ASK, extra_body=BUDGET, **SHORT).choices[0].message
    assert whole.reasoning
    assert whole.content
    stream = client.chat.completions.create(messages=ASK, extra_body=BUDGET, stream=True, **SHORT)
    deltas = [chunk.choices[0].delta for chunk in stream]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == whole.reasoning


def test_the_clients_own_accumulation_of_a_stream(client):
    extra = BUDGET | {"guided_choice": ["yes"]}
    with client.chat.completions.stream(
        messages=ASK, stream_options={"include_usage": True}, extra_body=extra, **SHORT
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= set(kinds)
    assert final.choices[0].message.content == "yes"
    assert final.usage.completion_tokens > 4
    assert final.usage.completion_tokens_details.reasoning_tokens == 4
    assert final.usage.prompt_tokens_details.cached_tokens >= 0


class Weather(BaseModel):
    """What the sky is like."""

    sky: Literal["clear", "cloudy"]
    windy: bool


def test_an_answer_as_an_object(client):
    options = SHORT | {"max_completion_tokens": 500}
    answer = client.chat.completions.parse(messages=ASK, response_format=Weather, extra_body=BUDGET, **options)
    assert isinstance(answer.choices[0].message.parsed, Weather)


class Look(BaseModel):
    """Look out of the window."""

    direction: Literal["north", "south"]


def test_tools_over_several_turns(client):
    """A call, its result, another call with both in its prompt, and an answer in words."""
    tools, messages = [openai.pydantic_function_tool(Look, name="look")], list(ASK)
    options = SHORT | {"max_completion_tokens": 200}
    for turn, choice in enumerate(("required", {"type": "function", "function": {"name": "look"}})):
        answer = client.chat.completions.parse(
            messages=messages, tools=tools, tool_choice=choice, parallel_tool_calls=False, extra_body=BUDGET, **options
        ).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert isinstance(call.function.parsed_arguments, Look)
        messages.append(answer.message.model_dump(exclude_none=True))
        result = {"role": "tool", "tool_call_id": call.id, "content": f"result {turn}"}
        messages.append(result)
    answer = client.chat.completions.create(messages=messages, tools=tools, tool_choice="none", **SHORT).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls is None


def test_calls_in_a_stream(client):
    tools = [openai.pydantic_function_tool(Look, name="look")]
    options = SHORT | {"max_completion_tokens": 200}
    name, arguments = "", ""
    for chunk in client.chat.completions.create(
        messages=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False, stream=True, extra_body=BUDGET,
        **options,
    ):  # fmt: skip
        for call in chunk.choices[0].delta.tool_calls or []:
            name += call.function.name or ""
            arguments += call.function.arguments or ""
    assert (name, set(json.loads(arguments))) == ("look", {"direction"})


def test_several_answers_stops_and_logprobs(client):
    answer = client.chat.completions.create(messages=ASK, n=3, logprobs=True, top_logprobs=2, **SHORT)
    assert len({str(choice.message) for choice in answer.choices}) == 3
    assert all(len(entry.top_logprobs) == 2 for choice in answer.choices for entry in choice.logprobs.content)
    text = answer.choices[0].message.reasoning
    stopped = client.chat.completions.create(messages=ASK, n=3, stop=[text[4:6]], **SHORT).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.reasoning == text[: text.index(text[4:6])]


def test_text_completions(client):
    answer = client.completions.create(model="tiny", prompt=["the", [5, 6, 7]], max_tokens=4, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1]
    chunks = client.completions.create(model="tiny", prompt="the", max_tokens=4, seed=1, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == answer.choices[0].text


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=ASK, model="tiny", max_tokens=10**6)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(messages=ASK, model="gpt-5")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        client.chat.completions.create(messages=ASK, temperature=-1, **SHORT)


def test_cancelling(nano):
    """An answer that would go on for long is left in three ways; the engine is at rest after each of them."""
    url, llm = nano
    endless = {"model": "tiny", "messages": ASK, "extra_body": {"ignore_eos": True}}

    async def rests():
        core = llm.client.link.core
        async with asyncio.timeout(30):
            while core.has_work:
                await asyncio.sleep(0)

    async def main():
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
            async with await client.chat.completions.create(stream=True, **endless) as stream:
                async for _ in stream:
                    break
            await rests()
            task = asyncio.create_task(client.chat.completions.create(**endless))
            async with asyncio.timeout(30):
                while not llm.client.link.core.has_work:
                    await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await rests()
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(timeout=0.2).chat.completions.create(**endless)
            await rests()

    asyncio.run(main())
