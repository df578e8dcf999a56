"""What is imported is installed: third-party imports against what pyproject.toml brings a user, extra by extra.

The extra `dev` does not count, which is why the tests' own environment cannot tell. Code is read, not run.
"""

import ast
import re
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
ROOT = REPO / "glm5"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# What a folder may import besides the dependencies of a bare install. A kernel in Triton is a file of its own, which is
# imported where it is launched.
EXTRAS = {"serve": ("serve",), "adapters": ("serve",), "demo": ("demo",), "kernels": ("gpu",), "bench": ("gpu",)}
SOURCES = sorted(ROOT.rglob("*.py"))


def normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def distributions(requirements: list[str]) -> set[str]:
    """The names in a list of requirements; those of our own extras are resolved."""
    found: set[str] = set()
    for requirement in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([^]]*)])?", requirement).groups()
        if name == PROJECT["name"]:
            for extra in extras.split(","):
                found |= distributions(PROJECT["optional-dependencies"][extra.strip()])
        else:
            found.add(normalized(name))
    return found


PROVIDERS = {
    package: {normalized(name) for name in names} for package, names in metadata.packages_distributions().items()
}


@cache
def brought(*extras: str) -> set[str]:
    """The distributions of an install with `extras`."""
    requirements = [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    return distributions([*PROJECT["dependencies"], *requirements])


def missing(packages: set[str], *extras: str) -> set[str]:
    """Those of the top-level `packages` that an install with `extras` does not bring."""
    return {name for name in packages if not (PROVIDERS.get(name, set()) | {normalized(name)}) & brought(*extras)}


class Imports(ast.NodeVisitor):
    """Modules that a file imports: early, while it is imported itself, and late, in functions. Types import none."""

    def __init__(self, path: Path):
        self.early: set[str] = set()
        self.late: set[str] = set()
        self.required: set[tuple[str, str]] = set()
        """(module, extra) of each `require`."""
        self._found = self.early
        self.visit(ast.parse(path.read_text(encoding="utf-8")))

    def visit_If(self, node: ast.If) -> None:
        for child in node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else [*node.body, *node.orelse]:
            self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outside, self._found = self._found, self.late
        self.generic_visit(node)
        self._found = outside

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Import(self, node: ast.Import) -> None:
        self._found.update(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        self._found.add(module)
        if module.partition(".")[0] == PROJECT["name"]:
            self._found.update(f"{module}.{alias.name}" for alias in node.names)

    def visit_Call(self, node: ast.Call) -> None:
        values = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        if isinstance(node.func, ast.Name) and node.func.id == "require" and len(values) == 2:
            self.required.add((values[0], values[1]))
        self.generic_visit(node)


imports = cache(Imports)


def third_party(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {PROJECT["name"], ""}


def file_of(module: str) -> Path | None:
    path = REPO.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def own_imports(path: Path) -> set[Path]:
    """The files of the package that `path` imports while it is imported itself, their folders' `__init__` included."""
    modules = [module.split(".") for module in imports(path).early if module.startswith("glm5")]
    names = {".".join(parts[: i + 1]) for parts in modules for i in range(len(parts))}
    return {file for name in names if (file := file_of(name))}


def reached(path: Path) -> set[Path]:
    """`path` and all files of the package that are imported with it."""
    seen, unread = {path}, [path]
    while unread:
        new = own_imports(unread.pop()) - seen
        seen |= new
        unread.extend(new)
    return seen


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0] if path.parent != ROOT else ""


def relative(path: Path) -> str:
    return str(path.relative_to(REPO))


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_what_a_file_imports_is_installed(path):
    found = imports(path)
    extras = EXTRAS.get(folder_of(path), ())
    with_it = set(extras) - ({"gpu"} if not path.name.startswith("triton") else set())
    early = {name for file in reached(path) for name in third_party(imports(file).early)}
    assert not missing(early, *with_it), "imported at the top, by this file or by one that it imports"
    assert not missing(third_party(found.late), *extras), "imported in a function"
    for module, extra in found.required:
        assert not missing({module.partition(".")[0]}, extra), f"require says that {extra!r} brings it"


@pytest.mark.parametrize(
    "line",
    [
        "import pytest",
        "from fastapi import FastAPI",
        "def f():\n    import hypothesis",
        "from glm5.serve.app import make_app",
        "require('openai', 'serve')",
    ],
)
def test_the_check_notices(line, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "quant").mkdir()
    (tmp_path / "quant" / "bad.py").write_text(line)
    with pytest.raises(AssertionError):
        test_what_a_file_imports_is_installed(tmp_path / "quant" / "bad.py")


def test_a_server_has_structured_output():
    assert {"xgrammar", "fastapi", "uvicorn", "starlette", "websockets"} <= distributions(["glm5[serve]"])
