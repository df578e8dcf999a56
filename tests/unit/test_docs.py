"""Documents name only what exists: paths, make targets and `glm5` command lines."""

import re
import shlex
from pathlib import Path

import pytest

from glm5.cli.main import COMMANDS, parse
from glm5.common.errors import UsageError

REPO = Path(__file__).parents[2]
DOCUMENTS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
TOP = {"glm5", "tests", "docs", "bench", "recipes", "scripts", ".ci"}
FOLDERS = {path.name for path in (REPO / "glm5").iterdir() if path.is_dir() and not path.name.startswith("_")}
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
AFTER_COMMAND = re.compile(r"\s(?:\||>|2>|&&|&|;)(?:\s|$).*")
NOT_RUN = ("--help", "--version", "COMMAND")


def code_pieces(text: str) -> list[str]:
    """Lines of fenced blocks, continued ones joined, and what stands between backticks."""
    lines = [line for block in FENCED.findall(text) for line in block.replace("\\\n", " ").splitlines()]
    return [piece.strip().removeprefix("$ ") for piece in lines + re.findall(r"`([^`]+)`", FENCED.sub("", text))]


def missing_paths(text: str) -> list[str]:
    """Paths that do not exist. `<op>` stands for any name, and `model/moe` for glm5/model/moe.py."""
    # The name of a command is no path, though there be a folder of that name.
    words = [word for piece in code_pieces(text) for word in re.sub(r"^glm5 [\w-]+", "", piece).split()]
    modules = re.findall(r"python3? -m ((?:glm5|tests)\b[\w.]*)", "\n".join(code_pieces(text)))
    missing = [name for name in modules if not [*REPO.glob(name.replace(".", "/") + "*")]]
    for word in words + re.findall(r"\]\(([^)#:]+)", text):
        path = word.strip("'\",.;:()").removeprefix("./").rstrip("/")
        first = path.partition("/")[0]
        if (
            first not in TOP | FOLDERS
            or ("/" not in path and first not in TOP)
            or not re.fullmatch(r"[\w./<>*-]+", path)
        ):
            continue
        pattern = re.sub(r"<\w+>", "*", path)
        homes = (REPO,) if first in TOP else (REPO / "glm5",)
        if not any([*home.glob(pattern), *home.glob(pattern + ".py")] for home in homes):
            missing.append(path)
    return missing


def anchors(document: Path) -> set[str]:
    """What links may name in a document: its headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", document.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(text: str, document: Path) -> list[str]:
    """Links of a document to files, or to headings in them, that are not there."""
    broken: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCED.sub("", text)):
        file, _, anchor = link.partition("#")
        path = document.parent / file if file else document
        if not re.match(r"\w+:", link) and (not path.exists() or (anchor and anchor not in anchors(path))):
            broken.append(link)
    return broken


def docker_runs(text: str) -> list[str]:
    return re.findall(r"docker run .*", text.replace("\\\n", " "))


def wrong_commands(text: str) -> list[str]:
    """Command lines that do not parse: `glm5 ...` and `make TARGET`."""
    return [piece for piece in code_pieces(text) if re.match(r"(glm5|make)\s", piece) and not parses(piece)]


def parses(line: str) -> bool:
    program, *words = shlex.split(AFTER_COMMAND.sub("", line), comments=True)
    words = [word.strip("[]") for word in words if word not in ("...", "…")]
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), flags=re.MULTILINE)
        return all(word in targets or "=" in word for word in words)
    if words[0] in NOT_RUN or " ".join(words).removesuffix(" --help") in COMMANDS:
        return True
    try:
        return callable(parse(words).run)
    except UsageError:
        return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_path_exists(document):
    assert not missing_paths(document.read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_parses(document):
    assert not wrong_commands(document.read_text(encoding="utf-8"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_somewhere(document):
    assert not broken_links(document.read_text(encoding="utf-8"), document)


def test_every_guide_is_in_the_list():
    readme = DOCUMENTS[0].read_text(encoding="utf-8")
    assert not [path.name for path in DOCUMENTS[2:] if f"\n| [docs/{path.name}](docs/{path.name}) | " not in readme]


def test_docker_lines_parse_and_let_nobody_in_without_a_key():
    texts = [path.read_text(encoding="utf-8") for path in [*DOCUMENTS, REPO / "Dockerfile"]]
    runs = [line for text in texts for line in docker_runs(text)]
    assert len(runs) >= 3
    for line in runs:
        assert parses(f"glm5 serve{line.rpartition(' glm5')[2]}"), line
        assert "-p 127.0.0.1:" in line, line
        assert "-e GLM5_API_KEY" in line or "--api-keys-file" in line, line


def test_examples_serve_what_fits_one_gpu():
    texts = [path.read_text(encoding="utf-8") for path in [*DOCUMENTS, REPO / "Dockerfile"]]
    assert not [line for text in texts for line in re.findall(r".*(?:serve|docker run).*zai-org/GLM-5-FP8.*", text)]


def test_the_tests_notice():
    text = """
See `glm5/nowhere.py`, `model/nothing`, [map](docs/no.md) and `glm5/cli/main.py`, `config/model`, `runs/demo/x`.

```sh
$ glm5 inspect \\
    --prezet nano | head   # twice
glm5 inspect --preset nano --json > x.json
glm5 init [--seed 3] --preset nano --out x
make everything
make test PIP_ARGS="-q"
python -m glm5.bench.nothing --ranks 8
python -m glm5.bench.steps --ranks 8
```
"""
    assert missing_paths(text) == ["glm5.bench.nothing", "glm5/nowhere.py", "model/nothing", "docs/no.md"]
    assert wrong_commands(text) == ["glm5 inspect      --prezet nano | head   # twice", "make everything"]
    text = "[a](no.md), [b](docs/map.md), [c](docs/map.md#walks), [d](docs/map.md#runs), [e](https://no.md), [](#walks)"
    assert broken_links(text, REPO / "README.md") == ["no.md", "docs/map.md#runs", "#walks"]
