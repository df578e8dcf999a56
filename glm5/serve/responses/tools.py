"""Tools of the Responses API: functions, namespaces of functions, and tools that OpenAI's service runs.

    {"type": "function", "name": "find"}                                          find
    {"type": "namespace", "name": "crm", "tools": [{"type": "function", ...}]}    crm__find
    {"type": "web_search"} and others in HOSTED                                   left out

The model sees functions alone, under the names on the right. A call of a namespace's function has namespace and name
apart again, as the client knows them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from glm5.chat.message import Tool
from glm5.common.errors import RequestError

HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp")
"""Tools that OpenAI's service runs, not the client. Dated forms and previews begin with these names too."""
_ALLOWED = f"function, namespace; {', '.join(HOSTED)} are left out"


@dataclass(frozen=True)
class OfferedTools:
    """`functions`: for the prompt. `namespaced`: of each function in a namespace, by its name in the prompt, namespace
    and name. `given`: the tools as the client gave them, without `hosted`, the types that were left out."""

    functions: list[Tool] = field(default_factory=list)
    namespaced: dict[str, tuple[str, str]] = field(default_factory=dict)
    given: list[Any] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)

    def named(self, name: str) -> dict[str, str]:
        """The fields that name a called function to the client."""
        namespace, own = self.namespaced.get(name, (None, name))
        return {"name": own} if namespace is None else {"name": own, "namespace": namespace}


def name_in_prompt(namespace: Any, name: str) -> str:
    """The name under which the model knows a function."""
    return f"{namespace.removesuffix('__')}__{name}" if isinstance(namespace, str) and namespace else name


def offered(tools: list[Any]) -> OfferedTools:
    """The tools of a request. Raises RequestError."""
    found = OfferedTools()
    for number, tool in enumerate(tools):
        where, kind = f"tools[{number}]", tool.get("type") if isinstance(tool, Mapping) else tool
        if isinstance(kind, str) and kind.startswith(HOSTED):
            found.hosted.append(kind)
            continue
        found.given.append(tool)
        if kind == "namespace":
            _add_namespace(tool, where, found)
        else:
            found.functions.append(_function(tool, where))
    counts = Counter(tool["function"]["name"] for tool in found.functions)
    for name, (namespace, own) in found.namespaced.items():
        if counts[name] > 1:
            got = f"the function {own!r:.60} of the namespace {namespace!r:.60} is {name!r:.130} to the model"
            raise RequestError(f"tools: {got}, and so is another one; rename one of them", "tools")
    return found


def _add_namespace(namespace: Mapping[str, Any], where: str, found: OfferedTools) -> None:
    name, tools = _name(namespace, where, "a namespace"), namespace.get("tools")
    if not isinstance(tools, list):
        raise RequestError(f"{where}.tools is {tools!r:.60}; allowed: a list of functions", f"{where}.tools")
    functions = list(_functions_of(name, tools, where))
    for own, function in functions:
        found.namespaced[function["name"]] = (name, own)
        found.functions.append({"type": "function", "function": function})
    about = _description(namespace, where)
    if about and functions:  # once, as it can be long
        first = functions[0][1]
        first["description"] = "\n".join(filter(None, (about, first.get("description"))))


def _functions_of(namespace: str, tools: list[Any], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, tool in enumerate(tools):
        function = _function(tool, f"{where}.tools[{number}]", "function")["function"]
        yield function["name"], {**function, "name": name_in_prompt(namespace, function["name"])}


def _function(tool: Any, where: str, allowed: str = _ALLOWED) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise RequestError(f"{where}.type is {kind!r:.60}; allowed: {allowed}", f"{where}.type")
    name = _name(tool, where, "a function")
    if tool.get("allowed_callers") not in (None, ["direct"]):
        callers = tool["allowed_callers"]
        raise RequestError(
            f'{where}.allowed_callers is {callers!r:.60}; allowed: ["direct"]', f"{where}.allowed_callers"
        )
    _description(tool, where)
    parameters = tool.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.parameters is {parameters!r:.60}; allowed: a JSON schema", f"{where}.parameters")
    kept = ("description", "parameters", "strict", "defer_loading")
    return {
        "type": "function",
        "function": {"name": name} | {key: tool[key] for key in kept if tool.get(key) is not None},
    }


def _description(tool: Mapping[str, Any], where: str) -> str | None:
    found = tool.get("description")
    if found is not None and not isinstance(found, str):
        raise RequestError(f"{where}.description is {found!r:.60}; allowed: a text", f"{where}.description")
    return found


def _name(tool: Mapping[str, Any], where: str, what: str) -> str:
    if not isinstance(name := tool.get("name"), str) or not name.strip():
        raise RequestError(f"{where}.name is {name!r:.60}; allowed: the name of {what}", f"{where}.name")
    return name
