"""The jinja2 environment in which chat templates run: transformers' dialect, sandboxed but for our own templates.

A template that comes with a checkpoint is as little trusted as the checkpoint: it cannot reach Python's
internals, files or mutable state. A template sees `messages`, `tools`, `add_generation_prompt`, the special
tokens and the request's own keywords, the filter `tojson`, and the functions `raise_exception` and
`strftime_now`.
"""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def compile_template(source: str, *, is_ours: bool = False) -> jinja2.Template:
    """Compile `source`; raises jinja2.TemplateSyntaxError with the line number."""
    kind = jinja2.Environment if is_ours else ImmutableSandboxedEnvironment  # which takes a fifth longer
    environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, LoopControls])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the model's output; only its body is rendered here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
