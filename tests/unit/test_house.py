"""What keeps the house in order: layers, sizes, what may be imported where, and documents that tell the truth.

The layer list is the definition; `docs/map.md` explains it.
"""

import ast
import difflib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from glm5.cli.main import COMMANDS, parsers

REPO = Path(__file__).parents[2]
ROOT = REPO / "glm5"
# By folder: what lies in it, from the top down. Files of the folder itself stand above its subfolders.
LAYERS = {
    "glm5": """
        cli
        demo adapters post_train
        serve bench eval
        rl
        engine quantize train
        checkpoint
        parallel quant
        model
        kernels chat
        config testing
        common
    """,
    "glm5.engine": """
        frontend distributed
        core
        runner
        transport
        scheduler
        cache
        sampling tiers
    """,
    "glm5.engine.runner": """
        graphs
        forward
        fused
        inputs
    """,
    "glm5.serve": """
        completions responses anthropic sglang vllm operations page coordination
        chat
        generation
        http
        service
        metrics
    """,
}
RANKS = {
    folder: {name: rank for rank, line in enumerate(lines.split("\n")) for name in line.split()}
    for folder, lines in LAYERS.items()
}
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
            assert node.level == 0, f"{path}: write imports in full"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module_of(path: Path) -> str:
    return ".".join(("glm5", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULE_NAMES = {module_of(path): path for path in SOURCES}


def upward_imports(module: str, names: set[str]) -> set[str]:
    """What of these imports lies on the module's own line of a list, or above it."""
    wrong: set[str] = set()
    for folder, ranks in RANKS.items():
        own = module.removeprefix(f"{folder}.").split(".")[0] if module.startswith(f"{folder}.") else ""
        if own in ranks:
            inside = {
                ".".join(name.split(".")[: folder.count(".") + 2]) for name in names if name.startswith(f"{folder}.")
            }
            wrong |= {
                name
                for name in inside - {f"{folder}.{own}"}
                if ranks.get(name.rpartition(".")[2], -1 if name in MODULE_NAMES else len(ranks) + 9) <= ranks[own]
            }
    return wrong


def imported_files(path: Path) -> set[Path]:
    """The files of this package that an import of this file names."""
    names = {name for name in imported_names(path) if name in MODULE_NAMES}
    # `from package import module` names the module; the package's own file only where the name is its own.
    packages = {name for name in names if any(other.startswith(f"{name}.") for other in names)}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    own |= {
        node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and any(f"{node.module}.{alias.name}" not in MODULE_NAMES for alias in node.names)
    }
    return {MODULE_NAMES[name] for name in names - (packages - own)} - {path}


def circles(imports: Mapping[Path, set[Path]]) -> list[set[Path]]:
    """Files each of which is reached from the others."""
    reached = {path: set(found) for path, found in imports.items()}
    grown = True
    while grown:
        grown = False
        for found in reached.values():
            more = set().union(*(reached[other] for other in found)) - found
            found |= more
            grown = grown or bool(more)
    found = {frozenset(other for other in reached[path] if path in reached[other]) for path in reached}
    return [set(circle) for circle in found if circle]


def python(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, cwd=REPO, check=False)


def test_every_folder_has_a_layer():
    for folder, ranks in RANKS.items():
        inside = {
            path.name for path in (ROOT.parent / folder.replace(".", "/")).iterdir() if (path / "__init__.py").exists()
        }
        assert inside == ranks.keys(), f"LAYERS[{folder!r}] and the folders there differ"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_point_down(path):
    wrong = sorted(upward_imports(module_of(path), imported_names(path)))
    assert not wrong, f"{module_of(path)} may not import {wrong}: move the shared part down, or pass it in"


def test_no_file_is_in_a_circle_of_imports():
    found = circles({path: imported_files(path) for path in SOURCES})
    assert not found, [sorted(map(relative, circle)) for circle in found]


def test_the_circle_test_notices():
    a, b, c = Path("a"), Path("b"), Path("c")
    assert circles({a: {b}, b: {c}, c: set()}) == []
    assert circles({a: {b}, b: {a}, c: {a}}) == [{a, b}]


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("glm5.kernels.bad", "from glm5.cli import main"),
        ("glm5.kernels.bad", "from glm5 import cli"),
        ("glm5.kernels.bad", "def f():\n    import glm5.cli.main"),
        ("glm5.kernels.bad", "import glm5.chat.x"),
        ("glm5.engine.scheduler.bad", "from glm5.engine.core.intake import Intake"),
        ("glm5.engine.scheduler.bad", "from glm5.engine.build import build_core"),
        ("glm5.engine.core.bad", "from glm5.engine import llm"),
        ("glm5.engine.runner.inputs.bad", "import glm5.engine.runner.graphs.decode"),
        ("glm5.engine.runner.inputs.bad", "from glm5.engine.runner.runner import Runner"),
        ("glm5.serve.chat.bad", "from glm5.serve.completions.body import CompletionBody"),
    ],
)
def test_the_layer_test_notices(module, line, tmp_path):
    (tmp_path / "file.py").write_text(line)
    assert upward_imports(module, imported_names(tmp_path / "file.py"))


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
        if relative(path) == "glm5/parallel/broadcast.py":  # torch takes settings of NCCL from nowhere else
            environment -= {"os.putenv"}
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
