"""Task folders in Harbor's format, read whole: what a box starts with, what is asked, what grades it.

    task.toml · instruction.md · environment/Dockerfile · tests/test.sh · solution/solve.sh
    with [[steps]]: steps/NAME/{instruction.md, tests/, solution/, workdir/}

Of a Dockerfile: FROM python, debian or ubuntu, WORKDIR, ENV, COPY, and after that RUN of what needs no network.
"""

import hashlib
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from glm5.common.bounded import MIB, read_bounded
from glm5.common.errors import ConfigError
from glm5.config.harbor import DOCKER, HarborAgent, HarborConfig, HarborVerifier, general_image, inside
from glm5.config.toml import read_toml

MAX_BYTES, MAX_FILES, MAX_SOLUTION = 8 * MIB, 1000, 16_000
Files = Mapping[str, bytes]
_INSTALLS = re.compile(r"\b(apt|apt-get|apk|pip3?|uv|conda|npm|curl|wget|git clone)\b")


@dataclass(frozen=True)
class HarborStep:
    """`workdir`: files that are put there as the step begins, of which setup.sh is run."""

    instruction: str
    tests: Files
    solution: str
    agent: HarborAgent = field(default_factory=HarborAgent)
    verifier: HarborVerifier = field(default_factory=HarborVerifier)
    workdir: Files = field(default_factory=dict[str, bytes])


@dataclass(frozen=True)
class HarborTask:
    """`files`: of the start, by their paths in the box, without the first slash; those that begin with #! may be
    executed. `setup`: lines of shell with the folders that they run in."""

    name: str
    steps: Sequence[HarborStep]
    config: HarborConfig = field(default_factory=HarborConfig.model_construct)
    files: Files = field(default_factory=dict[str, bytes])
    setup: Sequence[tuple[str, str]] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    workdir: str = "/app"

    @property
    def digest(self) -> str:
        """Of all that the task consists of."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


def read_task(folder: Path) -> HarborTask:
    """Raises ConfigError, which names the key or file that cannot be honoured."""
    config = read_toml(folder / "task.toml", (), HarborConfig)
    if (trajectory := next(folder.rglob("trajectory.json"), None)) is not None:
        raise ConfigError(f"{trajectory}: conversations that have begun are not supported; leave it out")
    if config.steps:
        places = [folder / "steps" / step.name for step in config.steps]
        steps = [_step(place, one.agent, one.verifier) for place, one in zip(places, config.steps, strict=True)]
    else:
        steps = [_step(folder, config.agent, config.verifier)]
    return _built(HarborTask(folder.name, steps, config, env=config.environment.env), folder / "environment")


def _step(folder: Path, agent: HarborAgent, verifier: HarborVerifier) -> HarborStep:
    instruction, tests, solution = (_files(folder / name) for name in ("instruction.md", "tests", "solution"))
    if "test.sh" not in tests or "instruction.md" not in instruction:
        raise ConfigError(f"{folder}: instruction.md and tests/test.sh must be there")
    text = solution.get("solve.sh", b"").decode(errors="replace")
    if len(solution) > 1 or len(text) > MAX_SOLUTION:
        raise ConfigError(f"{folder}/solution: allowed: solve.sh alone, of at most {MAX_SOLUTION} characters, as it is")
    asked = instruction["instruction.md"].decode(errors="replace")
    return HarborStep(asked, tests, text, agent, verifier, _files(folder / "workdir"))


def _files(place: Path) -> dict[str, bytes]:
    """Those in a folder, or the one at this place; none where nothing is."""
    paths = [place] if place.is_file() else sorted(path for path in place.rglob("*") if not path.is_dir())
    found, left = dict[str, bytes](), MAX_BYTES
    for path in paths[: MAX_FILES + 1]:
        if path.is_symlink() or len(paths) > MAX_FILES:
            raise ConfigError(f"{path}: allowed: regular files, at most {MAX_FILES} in a folder")
        if path.suffix != ".pyc":
            found[path.relative_to(place).as_posix() if path != place else path.name] = read_bounded(
                path, left, ConfigError
            )
            left -= path.stat().st_size
    return found


def _built(task: HarborTask, folder: Path) -> HarborTask:
    """With what environment/Dockerfile says."""
    context = _files(folder)
    if compose := next((name for name in context if re.fullmatch(r"(docker-)?compose.*\.ya?ml", name)), None):
        raise ConfigError(f"{folder / compose}: a box is alone; {DOCKER}")
    lines = re.sub(r"\\\r?\n", " ", context.pop("Dockerfile", b"").decode(errors="replace")).splitlines()
    files, setup, env, workdir = dict[str, bytes](), list[tuple[str, str]](), dict[str, str](), "/app"
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        try:
            match word.upper():
                case "FROM":
                    general_image(rest.strip())
                case "WORKDIR":
                    workdir = inside(posixpath.join(workdir, rest.strip()))
                case "ENV":
                    env |= dict(each.split("=", 1) for each in shlex.split(rest))
                case "COPY" if not setup:
                    files |= _copied(shlex.split(rest), context, workdir)
                case "RUN" if not _INSTALLS.search(rest) and not rest.startswith(("[", "--", "<<")):
                    setup.append((workdir, rest))
                case _ if word and not word.startswith("#"):
                    raise ValueError("FROM, WORKDIR, ENV, COPY before RUN, and RUN in shell form that installs nothing")
                case _:
                    pass
        except ValueError as error:
            raise ConfigError(f"{folder}/Dockerfile: got {line:.80}; allowed: {error}; else {DOCKER}") from None
    workdir = task.config.environment.workdir or workdir
    return HarborTask(task.name, task.steps, task.config, files, setup, {**env, **task.env}, workdir)


def _copied(words: Sequence[str], context: Files, workdir: str) -> dict[str, bytes]:
    """Of `COPY source ... target`: folders' contents, and files."""
    *sources, target = words
    copied, into = dict[str, bytes](), target.endswith(("/", ".")) or len(sources) > 1
    target = inside(posixpath.normpath(posixpath.join(workdir, target)))
    for source in map(posixpath.normpath, sources):
        found = {path: posixpath.relpath(path, source) for path in context if f"{path}/".startswith(f"{source}/")}
        found = {path: path for path in context} if source == "." else found
        if not found:
            raise ValueError("sources that are in environment/, without patterns and flags")
        for path, rest in found.items():
            last = posixpath.basename(path) if into else ""
            copied[posixpath.join(target, last if rest == "." else rest).strip("/")] = context[path]
    return copied
