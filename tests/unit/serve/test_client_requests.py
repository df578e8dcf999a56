"""Requests that agents and tools sent to a server, as recorded, and what each needs of the answers.

`tests/data/client_requests.json` has the requests of unmodified clients, each a conversation with the model's answers
of SCRIPTS. Descriptions, instructions and what names a machine are cut out; `common` has the fields that all requests
of a client share. What a client sends back of an answer shows what it read of it.
"""

import json
import re
from pathlib import Path

import httpx
import pytest

from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.config.presets import preset
from glm5.config.serve import ServeConfig
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.serve.app import create_app
from glm5.serve.http.server import bind, serving
from tests.support.models import random_model
from tests.support.running import logprobs_of
from tests.support.serving import scripted, served
from tests.unit.serve.asking import events_of, joined

REPO = Path(__file__).parents[3]
RECORDED = json.loads((REPO / "tests/data/client_requests.json").read_text(encoding="utf-8"))
SCRIPTS = {
    "Codex": [
        "I look.</think><tool_call>exec_command<arg_key>cmd</arg_key><arg_value>cat note.txt</arg_value></tool_call>",
        "</think><tool_call>mcp__notes__read_note<arg_key>title</arg_key><arg_value>first</arg_value></tool_call>",
        "</think><tool_call>multi_agent_v1__close_agent<arg_key>target</arg_key><arg_value>a-1</arg_value></tool_call>",
        "</think><tool_call>nosuchtool<arg_key>a</arg_key><arg_value>123_456</arg_value></tool_call>",
        "</think>The file holds 42.",
    ],
    "Claude Code": [
        "Look.</think><tool_call>Read<arg_key>file_path</arg_key><arg_value>/project/note.txt</arg_value></tool_call>",
        "</think><tool_call>nosuchtool<arg_key>a</arg_key><arg_value>123_456</arg_value></tool_call>",
        "</think>The file holds 42.",
    ],
    "anthropic": [
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>",
        "It is 21 degrees in Paris.",
    ],
    "llm": ["I ask.</think><tool_call>llm_version</tool_call>", "</think>It is 0.36."] * 2,
}
CLOSE = 1e-3  # float32; the server computes prompts in batches of other shapes


def recorded(client):
    """Headers and requests of a client, whose bodies are whole."""
    [found] = [entry for name, entry in RECORDED.items() if re.match(rf"{client} \d", name)]
    whole = [
        {**one, "body": None if one["body"] is None else found["common"] | one["body"]} for one in found["requests"]
    ]
    return found["headers"], whole


def exchanges(client, **settings):
    """(body, answer) of each of a client's requests, of which those that are answered have the script's answers."""
    engine = scripted()
    engine.max_model_len = 200_000
    headers, requests = recorded(client)
    scripts, found = iter(SCRIPTS[client]), []
    with served(engine, served_model_name=("glm",), **settings) as http:
        for request in requests:
            if request["method"] == "POST" and request["status"] == 200:
                engine.script = next(scripts)
            answer = http.request(request["method"], request["path"], json=request["body"], headers=headers)
            assert answer.status_code == request["status"], answer.text
            found.append((request["body"], answer))
    assert next(scripts, None) is None
    return found


def test_every_recorded_client_is_tested():
    names = {name.partition(",")[0].rpartition(" ")[0] for name in RECORDED}
    assert names == {*SCRIPTS, "lm-eval"}


def without_ids(items):
    """What a client keeps of items and blocks. Ids are new in each run."""
    dropped = ("id", "call_id", "status", "cache_control")
    return [{key: value for key, value in item.items() if key not in dropped} for item in items]


def test_codex(caplog):
    """Its tools of MCP servers and of sub-agents are in namespaces, and come back so; web search is left out."""
    turns = exchanges("Codex")
    responses = []
    for body, answer in turns:
        assert {"namespace", "web_search"} < {tool["type"] for tool in body["tools"]}
        events = [json.loads(event) for event in events_of(re.sub("^event: .*\n", "", answer.text, flags=re.MULTILINE))]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.completed"
        responses.append(events[-1]["response"])
        # What was streamed of an item is what it is in the end.
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == responses[-1]["output"]
    for (body, _), response, (after, _) in zip(turns, responses, turns[1:], strict=False):
        *kept, result = after["input"][len(body["input"]) :]
        assert result["type"] == "function_call_output"
        assert without_ids(kept) == without_ids(response["output"])
    calls = [item for response in responses for item in response["output"] if item["type"] == "function_call"]
    assert [(call.get("namespace"), call["name"], json.loads(call["arguments"])) for call in calls] == [
        (None, "exec_command", {"cmd": "cat note.txt"}),
        ("mcp__notes", "read_note", {"title": "first"}),
        ("multi_agent_v1", "close_agent", {"target": "a-1"}),
        (None, "nosuchtool", {"a": "123_456"}),
    ]
    assert responses[-1]["output"][-1]["content"][0]["text"] == "The file holds 42."
    assert {tool["type"] for tool in responses[0]["tools"]} == {"function", "namespace"}
    told = [record.getMessage() for record in caplog.records if "web_search" in record.getMessage()]
    assert told == ["requests have tools of the type 'web_search', which this server does not run: left out"]
    assert not any("does not know" in record.getMessage() for record in caplog.records)


def message_of(answer):
    """The message of a stream, as Anthropic's clients build it."""
    blocks, ending = [], {}
    for text in events_of(re.sub("^event: .*\n", "", answer.text, flags=re.MULTILINE)):
        event = json.loads(text)
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "input": ""})
        elif event["type"] == "content_block_delta":
            for name, more in event["delta"].items():
                if name != "type":
                    name = "input" if name == "partial_json" else name
                    blocks[-1][name] = blocks[-1].get(name, "") + more
        elif event["type"] == "message_delta":
            ending = event["delta"]
    for block in blocks:
        if (given := block.pop("input")) or block["type"] == "tool_use":
            block["input"] = json.loads(given)
    return {"content": blocks, **ending}


def test_claude_code():
    """It asks whether there is a server, and calls two tools, of which the second is none of its own."""
    (_, probe), *turns = exchanges("Claude Code")
    assert probe.content == b""
    messages = [message_of(answer) for _, answer in turns]
    assert [message["stop_reason"] for message in messages] == ["tool_use", "tool_use", "end_turn"]
    for (body, _), message, (after, _) in zip(turns, messages, turns[1:], strict=False):
        reply, result = after["messages"][len(body["messages"]) :]
        assert without_ids(reply["content"]) == without_ids(message["content"])
        assert result["content"][0]["type"] == "tool_result"
    assert messages[1]["content"][-1]["input"] == {"a": "123_456"}
    assert messages[-1]["content"] == [{"type": "text", "text": "The file holds 42."}]


def test_tool_runner():
    """It begins with a thread, and goes on without one after the refusal that it knows."""
    (first, refused), (asked, called), (after, answered) = exchanges("anthropic")
    assert first["thread"] == {"type": "create"}
    assert refused.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert asked == {name: value for name, value in first.items() if name != "thread"}
    assert called.json()["stop_reason"] == "tool_use"
    assert without_ids(after["messages"][1]["content"]) == without_ids(called.json()["content"])
    assert answered.json()["stop_reason"] == "end_turn"
    assert answered.json()["content"] == [{"type": "text", "text": "It is 21 degrees in Paris."}]


def test_llm():
    """Simon Willison's llm with a tool, streamed and not."""
    for (body, answer), (after, last) in zip(*[iter(exchanges("llm"))] * 2, strict=True):
        if body["stream"]:
            *chunks, done = events_of(answer.text)
            assert done == "[DONE]"
            choice = joined([json.loads(chunk) for chunk in chunks])[0]
            [call] = choice["calls"]
            content = joined([json.loads(chunk) for chunk in events_of(last.text)[:-1]])[0]["content"]
        else:
            [choice] = answer.json()["choices"]
            call = list(choice["message"]["tool_calls"][0]["function"].values())
            content = last.json()["choices"][0]["message"]["content"]
        assert choice["finish_reason"] == "tool_calls"
        assert call == ["llm_version", "{}"] == list(after["messages"][1]["tool_calls"][0]["function"].values())
        assert content == "It is 0.36."


def test_calls_of_other_tools_are_text_where_only_offered_ones_are_calls():
    turns = exchanges("Claude Code", only_offered_tools=True)
    message = message_of(turns[2][1])
    assert message["stop_reason"] == "end_turn"
    text = "<tool_call>nosuchtool<arg_key>a</arg_key><arg_value>123_456</arg_value>"
    assert message["content"] == [{"type": "text", "text": text}]


@pytest.fixture(scope="module")
def policy():
    """A tiny random model with the vocabulary of the one that lm-eval was recorded with, and its address."""
    tokenizer = Tokenizer.from_dir(REPO / "models/mini")
    model = random_model(11, preset("tiny").replace(vocab_size=2048, eos_token_id=tokenizer.eos_ids))
    config = ServeConfig.model_validate({"model": "org/tiny", "served_model_name": ("glm",)})
    with AsyncEngine(LLM(model, tokenizer, max_num_seqs=4)) as engine:
        app = create_app(engine, ChatTemplate.bundled("glm-5.2", tokenizer), tokenizer, config)
        with serving(app, engine, bind("127.0.0.1", 0)) as url:
            yield model, url


def test_lm_eval(policy):
    """Log-likelihoods of continuations, as its client sums them, are the model's."""
    model, url = policy
    headers, requests = recorded("lm-eval")
    num_scored = 0
    with httpx.Client(base_url=url, timeout=60, headers=headers) as http:
        for request in requests:
            answer = http.request(request["method"], request["path"], json=request["body"])
            assert answer.status_code == request["status"], answer.text
            if request["body"] is None:  # it asks for a tokenizer, and then takes that of a folder
                continue
            [choice] = answer.json()["choices"]
            if "logprobs" not in request["body"]:
                assert isinstance(choice["text"], str)
                continue
            [ids] = request["body"]["prompt"]
            told, want = choice["logprobs"], logprobs_of(model, ids)
            for context in range(1, len(ids)):
                values = told["token_logprobs"][context:-1]
                expected = [float(want[place - 1, ids[place]]) for place in range(context, len(ids))]
                assert sum(values) == pytest.approx(sum(expected), abs=CLOSE)
                is_greedy = all(int(want[place - 1].argmax()) == ids[place] for place in range(context, len(ids)))
                tops = told["top_logprobs"][context:-1]
                assert is_greedy == all(value == max(top.values()) for value, top in zip(values, tops, strict=True))
            num_scored += 1
    assert num_scored == 7
