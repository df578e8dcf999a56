"""A package with tests: what of a source distribution is program, test or other, and how its tests run in a box.

Tests stand in folders called test or tests, or are called test_*.py, *_test.py or conftest.py. A policy sees only
the program. Its changes count in .py files of the program only; everything else is as the package had it.
"""

import ast
import io
import json
import os
import py_compile
import re
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from glm5.common.errors import ConfigError
from glm5.rl.sandbox.sandbox import Sandbox

MAX_FILES, MAX_BYTES, MAX_FILE = 5_000, 60_000_000, 4_000_000
MODE = py_compile.PycInvalidationMode.UNCHECKED_HASH
RUNTIME = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py")
_TEST = re.compile(r"(^|/)(tests?|testing)/|(^|/)(test_[^/]*|[^/]*_tests?|conftest|tests?)\.py$")
_NO_PROGRAM = re.compile(r"^(docs?|examples?|benchmarks?|bench|tools|scripts|setup\.py|tasks\.py|noxfile\.py)(/|$)")


def read_source(source: Path) -> dict[str, bytes]:
    """The files of a folder or a .tar.gz by their paths below its top folder. Raises ConfigError, OSError."""
    files: dict[str, bytes] = {}
    size = 0
    try:
        for path, content in _entries(source):
            size += len(content)
            if len(files) >= MAX_FILES or size > MAX_BYTES:
                raise ConfigError(f"{source}: more than {MAX_FILES} files or {MAX_BYTES} bytes; give a smaller package")
            files[path] = content
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ConfigError(f"{source}: {error}; allowed: a folder, or a .tar.gz of one") from None
    return files


def _entries(source: Path) -> Iterator[tuple[str, bytes]]:
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file() and not path.is_symlink() and ".git" not in path.parts:
                yield _checked(path.relative_to(source).as_posix(), path.stat().st_size, path.read_bytes)
        return
    with tarfile.open(source, "r:gz") as archive:
        for member in archive:
            if member.isfile() and "/" in member.name:
                content = archive.extractfile(member)
                assert content is not None
                yield _checked(member.name.partition("/")[2], member.size, content.read)


def _checked(path: str, size: int, read: Callable[[], bytes]) -> tuple[str, bytes]:
    if ".." in PurePosixPath(path).parts or path.startswith("/"):
        raise ConfigError(f"{path!r:.80} leads out of its folder")
    return path, read() if size <= MAX_FILE and not path.endswith((".pyc", ".so")) else b""


def is_test(path: str) -> bool:
    return _TEST.search(path) is not None


def roots(files: Mapping[str, bytes]) -> list[str]:
    """Folders to import from: the one with the program, then the top."""
    inside = next(
        (top for top in ("src", "lib") if any(re.match(rf"{top}/[^/]+(/__init__)?\.py$", f) for f in files)), ""
    )
    return list(dict.fromkeys([inside or ".", "."]))


def packages(files: Mapping[str, bytes]) -> list[str]:
    """Folders of packages, with a slash, and files of modules: what can be imported, without tests."""
    top = re.escape(roots(files)[0].replace(".", ""))
    found = [re.match(rf"({top}/?)([^/]+/(?=__init__\.py$)|[^/]+\.py$)", path) for path in files if not is_test(path)]
    return sorted(each[0] for each in found if each and not _NO_PROGRAM.match(each[2]))


def program(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of packages and modules that can be imported, without tests."""
    tops = tuple(packages(files))
    return {path: content for path, content in files.items() if path.startswith(tops) and not is_test(path)}


def test_files(files: Mapping[str, bytes]) -> list[str]:
    """What pytest collects."""
    return sorted(path for path in files if re.search(r"(^|/)(test_[^/]*|[^/]*_tests?)\.py$", path))


def request(
    files: Mapping[str, bytes],
    do: str,
    collected: Sequence[str],
    seconds: float,
    test_seconds: float = 5.0,
    **more: Any,
) -> dict[str, Any]:
    """What the runner is asked. `seconds`: for one fork, `test_seconds`: for one test in it."""
    times = {"seconds": seconds, "test_seconds": test_seconds}
    return {"do": do, "path": roots(files), "files": list(collected), **times, **more}


def fill(box: Sandbox, files: Mapping[str, bytes], runtime: bytes) -> None:
    """Put a package and what runs its tests into a box. Raises OSError."""
    for path, content in files.items():
        box.write(f"repo/{path}", content)
    box.write("runtime.zip", runtime)
    box.write("runner.py", Path(__file__).with_name("runner.py").read_bytes())


def asked(box: Sandbox, python: str, about: Mapping[str, Any], seconds: float) -> list[Any]:
    """The lines that the runner answers; those before its end, where a limit ended it."""
    done = box.run([python, "-I", "-S", "-B", "runner.py"], timeout=seconds, stdin=json.dumps(about).encode())
    lines = list[Any]()
    for line in done.stdout.split(b"\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return lines


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
        test = node.test
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq):
            test.comparators[0] = _expression("object()")
        else:
            node.test = ast.UnaryOp(ast.Not(), test)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in ("assertEqual", "assertEquals", "assertListEqual", "assertDictEqual") and len(node.args) > 1:
            node.args[1] = _expression("object()")
        elif name in ("raises", "assertRaises") and node.args:
            node.args[0] = _expression("type('Other', (Exception,), {})")
        elif name in ("assertTrue", "assertFalse") and node.args:
            node.args[0] = _expression(str(int(name == "assertFalse")))
        return node


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def canary(content: bytes) -> bytes:
    """A test file with the same tests, that must fail."""
    return ast.unparse(ast.fix_missing_locations(_Canary().visit(ast.parse(content)))).encode()


def with_canaries(files: Mapping[str, bytes], names: Sequence[str]) -> dict[str, bytes]:
    """The files, in which these test files have canaries; those that cannot be read are left as they are."""
    changed = dict(files)
    for name in names:
        try:
            changed[name] = canary(files[name])
        except (ValueError, SyntaxError, RecursionError):
            continue
    return changed
