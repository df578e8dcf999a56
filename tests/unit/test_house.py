"""What keeps the house in order: layers, sizes, what may be imported where, and documents that tell the truth.

The layer list is the definition; `docs/map.md` explains it.
"""

import ast
import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from glm5.cli.main import COMMANDS, parsers

REPO = Path(__file__).parents[2]
ROOT = REPO / "glm5"
LAYERS = """
    cli
    demo
    serve bench eval
    engine quantize train
    checkpoint
    parallel quant
    model
    kernels chat
    config testing
    common
"""
RANK = {folder: rank for rank, line in enumerate(LAYERS.split("\n")) for folder in line.split()}
TORCH_FREE = ("common", "config", "chat", "cli")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 80

SOURCES = sorted(ROOT.rglob("*.py"))
MODULES = sorted(path for path in SOURCES if path.parent != ROOT)


def relative(path: Path) -> str:
    return str(path.relative_to(REPO))


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def imported_names(path: Path) -> set[str]:
    """Every module this file imports, also inside functions and under TYPE_CHECKING."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: write imports in full"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def upward_imports(path: Path) -> set[str]:
    names = {name.split(".")[1] for name in imported_names(path) if name.startswith("glm5.")}
    here = folder_of(path)
    return {name for name in names & RANK.keys() if name != here and RANK[name] <= RANK[here]}


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=REPO, check=False)


def test_every_folder_has_a_layer():
    folders = {folder_of(path) for path in MODULES}
    assert folders <= RANK.keys()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_point_down(path):
    wrong = sorted(upward_imports(path))
    assert not wrong, f"{folder_of(path)} may not import {wrong}: move the shared part down, or pass it in"


@pytest.mark.parametrize(
    "line",
    ["from glm5.cli import main", "from glm5 import cli", "def f():\n    import glm5.cli.main", "import glm5.chat.x"],
)
def test_the_layer_test_notices(line, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "bad.py").write_text(line)
    assert upward_imports(tmp_path / "kernels" / "bad.py")


def test_no_file_outgrows_a_reader():
    files = [*SOURCES, *REPO.glob("tests/**/*.py")]
    long = {
        relative(path): n
        for path in files
        if (n := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    }
    assert not long, f"split these: {long}"


def test_no_function_outgrows_a_reader():
    long = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert not long, f"split these: {long}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_what_may_not_stand_in_a_file(path):
    folder, names = folder_of(path), imported_names(path)
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    calls = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    attributes = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    assert "print" not in calls, "the package writes through glm5.common.console or logging"
    if folder != "cli":
        environment = {"os.environ", "os.getenv", "os.putenv"} & (attributes | names)
        assert not environment, "the environment is read in cli/ only; pass what you need"
    if folder == "model":
        distributed = [name for name in names | attributes if name.startswith("torch.distributed")]
        assert not distributed, "the model is single-device mathematics"


def test_torch_free_folders_import_no_torch():
    modules = [relative(path)[:-3].replace("/", ".") for path in MODULES if folder_of(path) in TORCH_FREE]
    code = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
"""
    done = python(code, "glm5", *(name.removesuffix(".__init__") for name in modules))
    assert done.returncode == 0, done.stderr


def test_help_imports_no_torch():
    code = (
        "import sys; from glm5.cli.main import main; main(['--help']); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "usage: glm5" in done.stdout


def test_public_names_are_there():
    import glm5

    for name in glm5.__all__:
        assert getattr(glm5, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = glm5.nothing


def test_the_list_of_commands_and_flags_is_the_agreed_one():
    """A new flag is a promise: add it to the golden file in the same change, and say why in the commit."""
    _, commands = parsers(*COMMANDS)
    flags = [f"{name} {flag}" for name, parser in commands.items() for flag in parser.flags()]
    golden = (REPO / "tests/data/cli_flags.txt").read_text().splitlines()
    assert flags == golden, "\n".join(difflib.unified_diff(golden, flags, "cli_flags.txt", "the parser", lineterm=""))
