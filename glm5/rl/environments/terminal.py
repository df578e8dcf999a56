"""Terminal tasks by seed, of ten kinds in three levels: more files and lines, and from folder to folder at the last.

The check is the state of /app alone: every file's content, which files may be executed, and where links lead must be as
asked, and nothing else may be there.
"""

import gzip
import hashlib
import io
import json
import tarfile
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from jinja2 import Environment as Jinja
from jinja2 import StrictUndefined, Template

from glm5.common.atomic import atomic_dir
from glm5.common.errors import ConfigError
from glm5.rl.environments.harbor import TerminalTasks
from glm5.rl.environments.harbor_task import HarborStep, HarborTask

WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron"),
    *("iris", "jade", "kelp", "lotus", "maple", "north", "olive", "pearl"),
)
SIZES = (4, 9, 16)
_END = " Change nothing else in /app, and leave no other files there."


@dataclass(frozen=True)
class _Kind:
    """What is asked of `files`, by the names that the templates have. `changes`: what is there afterwards, bytes or a
    link's target; None: it has gone. `loose`: files that may be as they like."""

    names: Mapping[str, object]
    files: Mapping[str, bytes]
    changes: Mapping[str, bytes | str | None]
    executable: frozenset[str] = frozenset()
    loose: str = ""


@cache
def _templates() -> dict[str, dict[str, Template]]:
    """Those of terminal.toml."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    jinja = Jinja(undefined=StrictUndefined, keep_trailing_newline=True)
    return {kind: {name: jinja.from_string(text) for name, text in table.items()} for kind, table in tables.items()}


def _of_every_task(what: str, **names: str) -> bytes:
    return _templates()["every"][what].render(names).encode()


class Terminal(TerminalTasks):
    """Tasks of one kind differ in all that is drawn: names, numbers, lines."""

    name, levels, sandbox_levels = "terminal", len(SIZES), range(len(SIZES))

    def made(self, seed: int, level: int) -> HarborTask:
        kind = KINDS[seed % len(KINDS)]
        one = kind(Random(f"terminal {level} {seed}"), level)
        wanted = {path: content for path, content in {**one.files, **one.changes}.items() if path != one.loose}
        lines = [f"executable ./{path}" for path in one.executable]
        for path, content in wanted.items():
            if isinstance(content, str):
                lines.append(f"link ./{path} {content}")
            elif content is not None:
                lines.append(f"{hashlib.sha256(content).hexdigest()}  ./{path}")
        loose = f" ./{one.loose}\n".encode() if one.loose else b""
        state = "".join(f"{line}\n" for line in sorted(lines)).encode()
        tests = {"test.sh": _of_every_task("test"), "state": state, "loose": loose}
        text, shell = (_templates()[kind.__name__][what].render(one.names) for what in ("text", "shell"))
        step = HarborStep(text + _END, tests, f"set -e\ncd /app\n{shell}")
        files = {f"app/{path}": content for path, content in one.files.items()}
        return HarborTask(f"{kind.__name__}-{level}-{seed}", [step], files=files)


def write_tasks(folder: Path, count: int) -> None:
    """Write tasks of the levels in turn as task folders of Harbor's. ConfigError where `folder` exists."""
    if folder.exists():
        raise ConfigError(f"{folder} exists; give the name of a new folder")
    with atomic_dir(folder) as building:
        for number in range(count):
            made = Terminal().made(number // len(SIZES), number % len(SIZES))
            step = made.steps[0]
            written = {"task.toml": _of_every_task("task", name=made.name), "instruction.md": step.instruction.encode()}
            written |= {f"tests/{path}": data for path, data in step.tests.items()}
            written |= {f"environment/{path}": data for path, data in made.files.items()}
            written["environment/Dockerfile"] = _of_every_task("dockerfile")
            written["solution/solve.sh"] = step.solution.encode()
            for path, data in written.items():
                file = building / made.name / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)


def _text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _place(random: Random, level: int) -> str:
    return random.choice(["", *(f"{word}/" for word in WORDS[:3])]) if level == len(SIZES) - 1 else ""


def _named(random: Random, level: int, ending: str) -> dict[str, bytes]:
    """Files of different names and contents."""
    names = random.sample([f"{word}{number}" for word in WORDS for number in range(10, 99)], SIZES[level])
    return {f"{_place(random, level)}{name}{ending}": f"{random.getrandbits(64):x}\n".encode() for name in names}


def rename(random: Random, level: int) -> _Kind:
    old, new = random.sample(["txt", "log", "dat", "md", "bak"], 2)
    files, folder = _named(random, level, f".{old}"), random.choice(WORDS)[:4] + str(random.randint(1, 99))
    moved = {f"{folder}/{path.split('/')[-1][: -len(old)]}{new}": data for path, data in files.items()}
    names = {"old": old, "new": new, "folder": folder}
    return _Kind(names, files | _named(random, 0, ".keep"), dict.fromkeys(files) | moved)


def filter_lines(random: Random, level: int) -> _Kind:
    word, least = random.choice(WORDS), random.randint(100, 600)
    lines = [f"{random.choice([word, *WORDS[:4]])} {random.randint(100, 999)}" for _ in range(5 * SIZES[level])]
    kept = sorted({line for line in lines if line.split()[0] == word and int(line.split()[1]) >= least})
    return _Kind({"word": word, "least": least}, {"notes.txt": _text(lines)}, {"out.txt": _text(kept)})


def totals(random: Random, level: int) -> _Kind:
    rows = [(random.choice(WORDS[:7]), random.randint(1, 999)) for _ in range(4 * SIZES[level])]
    sums, is_by_total = Counter[str](), random.choice([False, True])
    for item, amount in rows:
        sums[item] += amount
    ordered = sorted(sums.items(), key=lambda pair: (pair[1] if is_by_total else 0, pair[0]))
    files = {"sales.csv": _text(["item,amount", *(f"{item},{amount}" for item, amount in rows)])}
    wanted = _text(["item,total", *(f"{item},{total}" for item, total in ordered)])
    return _Kind({"is_by_total": is_by_total}, files, {"totals.csv": wanted})


def edit_json(random: Random, level: int) -> _Kind:
    document = {word: {"size": random.randint(1, 999), "on": False} for word in random.sample(WORDS, SIZES[level])}
    changed, sizes = json.loads(json.dumps(document)), dict[str, int]()
    for word in random.sample(sorted(document), 1 + level):
        changed[word]["size"] = sizes[word] = random.randint(1000, 9999)
    before, after = ((json.dumps(one, indent=2) + "\n").encode() for one in (document, changed))
    return _Kind({"sizes": sizes.items()}, {"settings.json": before}, {"settings.json": after})


def count_errors(random: Random, level: int) -> _Kind:
    severity, files, counts = random.choice(["ERROR", "WARN"]), dict[str, bytes](), Counter[str]()
    for number in range(2 + level):
        rows = [(random.choice(["ERROR", "WARN", "INFO"]), random.choice(WORDS[:5])) for _ in range(2 * SIZES[level])]
        counts.update(service for kind, service in rows if kind == severity)
        lines = [f"{random.randint(10, 23)}:{random.randint(10, 59)} {kind} {name}: no ERROR" for kind, name in rows]
        files[f"{_place(random, level)}day{number}.log"] = _text(lines)
    counted = _text([f"{name} {counts[name]}" for name in sorted(counts)])
    return _Kind({"severity": severity}, files, {"counts.txt": counted})


def unpack(random: Random, level: int) -> _Kind:
    inner, junk, folder = _named(random, level, ".txt"), 16 * level, random.choice(WORDS)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in inner.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    whole = random.randbytes(junk) + gzip.compress(packed.getvalue(), mtime=0)
    changes = {f"{folder}/{path}": data for path, data in inner.items()}
    return _Kind({"junk": junk, "folder": folder}, {"files.tar.gz": whole}, {"files.tar.gz": None, **changes})


def link_newest(random: Random, level: int) -> _Kind:
    versions, stem = random.sample(range(1, 200), SIZES[level]), random.choice(WORDS)
    files = {f"{stem}-{version}.sh": f"echo {random.getrandbits(40)}\n".encode() for version in versions}
    newest = f"{stem}-{max(versions)}.sh"
    even = frozenset(f"{stem}-{version}.sh" for version in versions if version % 2 == 0)
    return _Kind({"stem": stem}, files, {f"{stem}-latest": newest}, even)


def mend_script(random: Random, level: int) -> _Kind:
    numbers, factor = [random.randint(1, 99) for _ in range(SIZES[level])], random.randint(2, 99)
    wrong = random.choice(["total=$((n * {}))", "total=$((total - n * {}))", "totl=$((total + n * {}))"]).format(factor)
    script = ["total=0", "while read -r n; do", f"  {wrong}", "done < numbers.txt", "echo $total > sum.txt"]
    files = {"sum.sh": _text(script), "numbers.txt": _text([str(number) for number in numbers])}
    return _Kind({"factor": factor}, files, {"sum.txt": f"{factor * sum(numbers)}\n".encode()}, loose="sum.sh")


def merge_settings(random: Random, level: int) -> _Kind:
    layers = list[dict[str, str]]()
    for _ in range(2 + level):
        layers.append({f"{key}.{random.randint(1, 3)}": str(random.randint(1, 99)) for key in WORDS[: SIZES[level]]})
    names = [f"{number}-{random.choice(WORDS)}.conf" for number in range(len(layers))]
    merged = {key: value for layer in layers for key, value in layer.items()}
    files = {name: _text([f"{k}={v}" for k, v in layer.items()]) for name, layer in zip(names, layers, strict=True)}
    wanted = _text([f"{key}={merged[key]}" for key in sorted(merged)])
    return _Kind({"names": names}, files, {**dict.fromkeys(names), "merged.conf": wanted})


def duplicates(random: Random, level: int) -> _Kind:
    names = sorted(random.sample([f"{word}{number}.bin" for word in WORDS for number in range(10, 99)], SIZES[level]))
    contents = [f"{random.getrandbits(64):x}\n".encode() for _ in range(len(names) // 2)]
    files = {name: random.choice(contents) for name in names}
    kept = {data: name for name, data in sorted(files.items(), reverse=True)}
    sums = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}" for name in sorted(kept.values())]
    gone = {name: None for name in names if name not in kept.values()}
    return _Kind({}, files, {**gone, "sums.txt": _text(sums)})


KINDS: tuple[Callable[[Random, int], _Kind], ...] = (
    rename, filter_lines, totals, edit_json, count_errors, unpack, link_newest, mend_script, merge_settings, duplicates
)  # fmt: skip
