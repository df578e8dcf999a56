"""Tools of the Responses API: namespaces as the model sees them, and what is left out or refused."""

import pytest

from glm5.common.errors import RequestError
from glm5.serve.responses.tools import HOSTED, name_in_prompt, offered

FIND = {"type": "function", "name": "find", "description": "Finds.", "parameters": {"type": "object"}, "strict": None}
CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [FIND, {**FIND, "name": "add"}]}
SEARCH = {"type": "web_search", "external_web_access": False}


def test_a_namespace_is_flattened_and_given_back():
    found = offered([FIND, CRM, {**CRM, "name": "mcp__notes__", "description": ""}])
    names = ["find", "crm__find", "crm__add", "mcp__notes__find", "mcp__notes__add"]
    assert [tool["function"]["name"] for tool in found.functions] == names
    # The namespace's description comes once.
    about = ["Finds.", "Customers.\nFinds.", "Finds.", "Finds.", "Finds."]
    assert [tool["function"]["description"] for tool in found.functions] == about
    assert found.named("find") == {"name": "find"}
    assert found.named("crm__add") == {"name": "add", "namespace": "crm"}
    assert found.named("mcp__notes__add") == {"name": "add", "namespace": "mcp__notes__"}
    assert found.named("crm__nothing") == {"name": "crm__nothing"}, "not offered"
    assert CRM["tools"][0]["description"] == "Finds.", "the request is left as it is"


@pytest.mark.parametrize("namespace", ["crm", "mcp__notes__"])
def test_a_call_in_the_history_has_the_name_of_the_prompt(namespace):
    found = offered([{**CRM, "name": namespace}])
    for flat, (given, name) in found.namespaced.items():
        assert name_in_prompt(given, name) == flat
    assert name_in_prompt(None, "find") == name_in_prompt("", "find") == "find"


@pytest.mark.parametrize("kind", [*HOSTED, "web_search_preview", "web_search_2025_08_26"])
def test_what_the_service_would_run_is_left_out(kind):
    found = offered([{"type": kind}, FIND])
    assert (found.hosted, found.given) == ([kind], [FIND])
    assert len(found.functions) == 1


def test_a_namespace_over_http(http, engine):
    """Also in a stored response that another one continues."""
    engine.script = "</think><tool_call>crm__find</tool_call><|user|>"
    body = {"model": "tiny", "input": "hi", "tools": [SEARCH, CRM]}
    first = http.post("/v1/responses", json=body).json()
    [call] = first["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("crm", "find", "{}")
    assert first["tools"] == [CRM]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "none"}
    more = {"input": [result], "previous_response_id": first["id"]}
    assert http.post("/v1/responses", json=body | more).status_code == 200
    assert "<tool_call>crm__find" in engine.tokenizer.decode(engine.prompt_ids)
    chosen = {"type": "function", "name": "crm__find"}
    forced = http.post("/v1/responses", json=body | {"tool_choice": chosen})
    assert forced.status_code == 200
    refused = http.post("/v1/responses", json=body | {"tools": [SEARCH], "tool_choice": "required"})
    assert refused.json()["error"]["message"] == "tool_choice requires a call, but there are no tools"


BAD = [
    ([{**CRM, "name": None}], "tools[0].name is None; allowed: the name of a namespace", "tools[0].name"),
    ([{**CRM, "tools": None}], "tools[0].tools is None; allowed: a list of functions", "tools[0].tools"),
    ([{**CRM, "tools": [CRM]}], "tools[0].tools[0].type is 'namespace'; allowed: function", "tools[0].tools[0].type"),
    ([{**CRM, "tools": [{**FIND, "name": ""}]}], "tools[0].tools[0].name is ''; allowed: the name of a function",
     "tools[0].tools[0].name"),
    ([{**CRM, "tools": [{**FIND, "description": 5}]}], "tools[0].tools[0].description is 5; allowed: a text",
     "tools[0].tools[0].description"),
    ([{**CRM, "description": ["a"]}], "tools[0].description is ['a']; allowed: a text", "tools[0].description"),
    ([CRM, {**FIND, "name": "crm__find"}], "tools: the function 'find' of the namespace 'crm' is 'crm__find' to the",
     "tools"),
    ([CRM, {**CRM, "name": "crm__"}], "tools: the function 'find' of the namespace", "tools"),
    ([{"type": "custom", "name": "x"}], "tools[0].type is 'custom'; allowed: function, namespace; web_search, ",
     "tools[0].type"),
    (["find"], "tools[0].type is 'find'; allowed: function", "tools[0].type"),
    ([5], "tools[0].type is 5; allowed: function", "tools[0].type"),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "message", "param"), BAD)
def test_refusals_name_the_field(tools, message, param):
    with pytest.raises(RequestError) as caught:
        offered(tools)
    assert str(caught.value).startswith(message)
    assert caught.value.param == param
