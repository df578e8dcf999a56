"""The names that users write down: python -m tests.public_names writes them to tests/data/public_names.txt.

    route     of the server, and the fields of its bodies   metric    with its labels
    answer    fields of what the server answers             python    what `glm5` exports: names, parameters, fields
    recipe    keys of training's and of quantization's

Commands and flags are in tests/data/cli_flags.txt.
"""

import dataclasses
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel

import glm5
import glm5.engine
from glm5 import LLM, AsyncEngine
from glm5.config.keywords import EngineKeywords
from glm5.config.presets import preset
from glm5.config.recipe import Recipe as QuantizeRecipe
from glm5.config.train import Recipe as TrainRecipe
from tests.support.models import random_model
from tests.support.serving import bearer, key, served
from tests.support.tokenizers import tiny_tokenizer

GOLDEN = Path(__file__).parent / "data/public_names.txt"
MESSAGES = [{"role": "user", "content": "hi"}]
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED = {  # requests whose answers show their fields, streamed and in one piece
    "/v1/completions": {"prompt": "hi", "logprobs": 1, "max_tokens": 4, "return_token_ids": True},
    "/v1/chat/completions": {
        "messages": MESSAGES,
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 4,
        "return_token_ids": True,
    },
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 4},
    "/v1/completions/render": {"prompt": "hi"},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 4}, "return_logprob": True},
    "/inference/v1/generate": {
        "token_ids": [1, 2],
        "sampling_params": {"max_tokens": 4, "logprobs": 1},
        "return_token_ids": True,
    },
}
LOOKED_AT = (
    "/v1/models",
    "/health",
    "/version",
    "/get_model_info",
    "/get_server_info",
    "/server_info",
    "/load",
    "/v1/loads",
)


def public_names() -> list[str]:
    """All of them, sorted; a line each."""
    names = {f"recipe train {key}" for key in keys(TrainRecipe)}
    names |= {f"recipe quantize {key}" for key in keys(QuantizeRecipe)}
    names |= {f"python {name}" for name in python()}
    names |= set(over_http())
    return sorted(names)


def keys(model: type[BaseModel], above: str = "", seen: tuple[type, ...] = ()) -> Iterator[str]:
    """Dotted paths of a tree of sections; one within itself is followed once."""
    for name, field in model.model_fields.items():
        path = f"{above}{field.alias or name}"
        yield path
        for section in sections(field.annotation):
            if section not in seen:
                yield from keys(section, f"{path}.", (*seen, section))


def sections(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and not get_origin(kind) and issubclass(kind, BaseModel):
        yield kind
    elif isinstance(kind, UnionType) or get_origin(kind) is not None:
        for inner in get_args(kind):
            yield from sections(inner)


def python() -> Iterator[str]:
    for module in (glm5, glm5.engine):
        for name in module.__all__:
            yield f"{module.__name__}.{name}"
            yield from members(f"{module.__name__}.{name}", getattr(module, name))
    yield from (f"glm5.LLM({name}=)" for name in EngineKeywords.model_fields)


def members(path: str, one: Any) -> Iterator[str]:
    if inspect.isfunction(one):
        yield from (f"{path}({name}=)" for name in inspect.signature(one).parameters)
        return
    if not inspect.isclass(one):
        return
    yield from (f"{path}({name}=)" for name in inspect.signature(one).parameters)
    if dataclasses.is_dataclass(one):
        yield from (f"{path}.{field.name}" for field in dataclasses.fields(one))
    for name, member in inspect.getmembers(one):
        if name.startswith("_"):
            continue
        yield f"{path}.{name}"
        if inspect.isfunction(member):
            parameters = [parameter for parameter in inspect.signature(member).parameters if parameter != "self"]
            yield from (f"{path}.{name}({parameter}=)" for parameter in parameters)


def over_http() -> Iterator[str]:
    cfg = preset("tiny").replace(eos_token_id=tiny_tokenizer().eos_ids)
    llm = LLM(random_model(11, cfg), tiny_tokenizer(), max_num_seqs=4, num_speculative_tokens=1)
    with AsyncEngine(llm) as engine, served(engine, key("boss", role="admin")) as http:
        http.headers.update(bearer("boss"))
        for document in ("/openapi.json", "/admin/openapi.json"):
            for path, methods in http.get(document).raise_for_status().json()["paths"].items():
                for method, what in methods.items():
                    yield f"route {method.upper()} {path}"
                    content = what.get("requestBody", {}).get("content", {})
                    for kind in content.values():
                        yield from (f"route {method.upper()} {path} {field}" for field in fields(kind["schema"]))
        for path, body in ASKED.items():
            answer = http.post(path, json=body).raise_for_status()
            yield from (f"answer {path} {field}" for field in paths(answer.json()))
            streamed = http.post(path, json=body | {"stream": True}).raise_for_status().text
            events = [line.removeprefix("data: ") for line in streamed.splitlines() if line.startswith("data: {")]
            yield from (f"answer {path} stream {field}" for event in events for field in paths(json.loads(event)))
        for path in LOOKED_AT:
            answer = http.get(path)
            if answer.status_code == 200 and answer.text:
                yield from (f"answer {path} {field}" for field in paths(answer.json()))
        yield from metrics(http.get("/metrics").raise_for_status().text)


def fields(schema: dict[str, Any], above: str = "") -> Iterator[str]:
    """Names of properties at any depth."""
    for name, inner in schema.get("properties", {}).items():
        yield f"{above}{name}"
        yield from fields(inner, f"{above}{name}.")
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())):
        yield from fields(choice, above)
    if isinstance(schema.get("items"), dict):
        yield from fields(schema["items"], above)


def paths(value: Any, above: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield f"{above}{name}"
            yield from paths(inner, f"{above}{name}.")
    elif isinstance(value, list):
        for inner in value:
            yield from paths(inner, above)


def metrics(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels = [pair.partition("=")[0] for pair in rest.partition("}")[0].split(",")] if rest else []
            yield f"metric {name.split()[0]} {' '.join(sorted(set(labels)))}".rstrip()


if __name__ == "__main__":
    GOLDEN.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
