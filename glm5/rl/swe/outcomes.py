"""What comes of a package's tests, in a box; and canaries, which are the same tests with claims that are wrong."""

import ast
import io
import json
import os
import py_compile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from glm5.common.errors import ConfigError
from glm5.rl.sandbox.sandbox import Sandbox
from glm5.rl.swe.package import is_test, roots

RUNTIME = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py")
MODE = py_compile.PycInvalidationMode.UNCHECKED_HASH
QUIET = ("--assert=plain", "--tb=no", "-pno:unraisableexception")
"""Options for runs of which only the outcomes count: they take a third of the time."""


class Outcome(NamedTuple):
    """Of a test: "passed", "failed" or "skipped"; "begun", of one that ended its process. `called`: functions of the
    package, by path and first line, where the run was traced."""

    test: str
    outcome: str
    seconds: float
    told: str
    called: list[tuple[str, int]]


_LINE = msgspec.json.Decoder(list[Outcome])


def run_tests(
    box: Sandbox,
    python: str,
    files: Mapping[str, bytes],
    collected: Sequence[str],
    runs: Sequence[Mapping[str, Any]] = ({},),
    *,
    is_loaded: bool = True,
    seconds: float,
    test_seconds: float = 5.0,
    limit: float | None = None,
    options: Sequence[str] = (),
) -> list[dict[str, Outcome]]:
    """For each run (runner.py), what came of its tests; fewer where `limit` seconds or another limit of the box ended
    them. `seconds`: for each run. The box must be new. Raises OSError."""
    for path, content in files.items():
        box.write(f"repo/{path}", content)
    box.write("runtime.zip", runtime())
    box.write("runner.py", Path(__file__).with_name("runner.py").read_bytes())
    times = {"seconds": seconds, "test_seconds": test_seconds}
    about = {"path": roots(files), "files": collected, "runs": runs, "is_loaded": is_loaded, "options": options}
    stdin = json.dumps({**about, **times}).encode()
    done = box.run([python, "-I", "-S", "-B", "runner.py"], timeout=limit or len(runs) * seconds + 10, stdin=stdin)
    try:
        return [{one.test: one for one in _LINE.decode(line)} for line in done.stdout.split(b"\n")[:-1]]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []  # the program told something else


@cache
def runtime() -> bytes:
    """pytest and what it needs, compiled, as a zip file. Raises ConfigError where it is not installed."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive, tempfile.TemporaryDirectory() as folder:
        for name in RUNTIME:
            spec = find_spec(name)
            if spec is None or spec.origin is None:
                raise ConfigError(f"this needs the package {name!r}: run  pip install pytest")
            top, is_folder = Path(spec.origin).parent, spec.origin.endswith("__init__.py")
            for file in sorted(top.rglob("*.py")) if is_folder else [Path(spec.origin)]:
                inside = f"{name}/{file.relative_to(top)}" if is_folder else file.name
                compiled = os.path.join(folder, "compiled")
                py_compile.compile(str(file), compiled, inside, invalidation_mode=MODE)
                archive.write(file, inside)
                archive.write(compiled, f"{inside}c")
    return packed.getvalue()


class _Canary(ast.NodeTransformer):
    """Tests in which every claim is wrong."""

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        match node.test:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):  # what equals everything may be either
                equal = [ast.Compare(side, [ast.Eq()], [_expression("object()")]) for side in (left, right)]
                node.test = ast.BoolOp(ast.Or(), list[ast.expr](equal))
            case test:
                node.test = ast.UnaryOp(ast.Not(), test)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        match node.func.attr if isinstance(node.func, ast.Attribute) else "", len(node.args):
            case "assertEqual" | "assertEquals" | "assertListEqual" | "assertDictEqual", count if count > 1:
                node.args[1] = _expression("object()")
            case "raises" | "assertRaises", count if count:
                node.args[0] = _expression("type('Other', (Exception,), {})")
            case "assertTrue" | "assertFalse" as name, count if count:
                node.args[0] = _expression(str(name == "assertFalse"))
            case _:
                pass
        return node


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


@lru_cache(maxsize=1024)
def canary(content: bytes) -> bytes:
    """A test file with the same tests, that must fail; one that cannot be read stays as it is."""
    try:
        return ast.unparse(ast.fix_missing_locations(_Canary().visit(ast.parse(content)))).encode()
    except (ValueError, SyntaxError, RecursionError):
        return content


def with_canaries(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files, in which those of tests, and what they import beside them, have canaries."""
    names = [path for path in files if path.endswith(".py") and is_test(path) and not path.endswith("conftest.py")]
    return {**files, **{name: canary(files[name]) for name in names}}
