"""HTML by the templates beside this file; values are escaped in them."""

from functools import cache
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("glm5.rl.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["address"] = address
    return found


def render(name: str, /, **values: Any) -> str:
    """The template of that name, for a page or another template."""
    return _environment().get_template(f"{name}.jinja").render(values)


def address(path: str, **query: object) -> str:
    """Of a page."""
    return f"{path}?{urlencode(query)}"
