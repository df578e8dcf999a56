"""Terminal tasks by seed, of ten kinds in three levels: more files and lines, and from folder to folder at the last.

The check is the state of /app alone: every file's content, which files may be executed, and where links lead must be as
asked, and nothing else may be there.
"""

import gzip
import hashlib
import io
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from glm5.common.atomic import atomic_dir
from glm5.common.errors import ConfigError
from glm5.rl.environments.boxes import NO_BOXES, Boxes
from glm5.rl.environments.harbor import TerminalTasks
from glm5.rl.environments.harbor_task import HarborStep, HarborTask

WORDS = (
    *("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron"),
    *("iris", "jade", "kelp", "lotus", "maple", "north", "olive", "pearl"),
)
SIZES = (4, 9, 16)
_END = " Change nothing else in /app, and leave no other files there."
_TEST = b"""cd /app
{ find . -type f -exec sha256sum {} +
  find . -type f -perm -100 -printf 'executable %p\\n'
  find . -type l -printf 'link %p %l\\n'
} | grep -vFf /tests/loose | LC_ALL=C sort > /tmp/state
if cmp -s /tmp/state /tests/state; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
_TOML = """schema_version = "1.4"
[task]
name = "glm5/{name}"
keywords = ["terminal"]
[agent]
timeout_sec = 300.0
[verifier]
timeout_sec = 30.0
[environment]
network_mode = "no-network"
"""


@dataclass(frozen=True)
class _Kind:
    """What is asked of `files`. `changes`: what is there afterwards, bytes or a link's target; None: it has gone.
    `loose`: files that may be as they like."""

    text: str
    files: Mapping[str, bytes]
    changes: Mapping[str, bytes | str | None]
    solution: str
    executable: frozenset[str] = frozenset()
    loose: str = ""


class Terminal(TerminalTasks):
    """Tasks of one kind differ in all that is drawn: names, numbers, lines."""

    name, levels, sandbox_levels = "terminal", len(SIZES), range(len(SIZES))

    def __init__(self, boxes: Boxes = NO_BOXES) -> None:
        super().__init__(boxes)

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
        tests = {"test.sh": _TEST, "state": state, "loose": loose}
        step = HarborStep(one.text + _END, tests, f"set -e\ncd /app\n{one.solution}\n")
        files = {f"app/{path}": content for path, content in one.files.items()}
        return HarborTask(f"{kind.__name__}-{level}-{seed}", [step], files=files)


def write_tasks(folder: Path, count: int) -> None:
    """Write tasks of the levels in turn as task folders of Harbor's. ConfigError where `folder` exists."""
    if folder.exists():
        raise ConfigError(f"{folder} exists; give the name of a new folder")
    with atomic_dir(folder) as building:
        for number in range(count):
            made = Terminal().made(number // len(SIZES), number % len(SIZES))
            step, docker = made.steps[0], "FROM python:3.12-slim\nWORKDIR /app\nCOPY app/ /app/\n"
            written = {"task.toml": _TOML.format(name=made.name).encode(), "instruction.md": step.instruction.encode()}
            written |= {f"tests/{path}": data for path, data in step.tests.items()}
            written |= {f"environment/{path}": data for path, data in made.files.items()}
            written |= {"solution/solve.sh": step.solution.encode(), "environment/Dockerfile": docker.encode()}
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
    text = (
        f"Move every .{old} file under /app into the folder /app/{folder}, with the ending .{new} in place of .{old}."
    )
    shell = (
        f"mkdir {folder}\nfind . -name '*.{old}' | while read -r f; do mv $f {folder}/$(basename $f .{old}).{new}; done"
    )
    return _Kind(text, files | _named(random, 0, ".keep"), dict.fromkeys(files) | moved, shell)


def filter_lines(random: Random, level: int) -> _Kind:
    word, least = random.choice(WORDS), random.randint(100, 600)
    lines = [f"{random.choice([word, *WORDS[:4]])} {random.randint(100, 999)}" for _ in range(5 * SIZES[level])]
    kept = sorted({line for line in lines if line.split()[0] == word and int(line.split()[1]) >= least})
    text = f"Write those lines of /app/notes.txt whose word is {word} and whose number is at least {least} to "
    text += "/app/out.txt, each once, sorted."
    shell = f"awk '$1 == \"{word}\" && $2 >= {least}' notes.txt | LC_ALL=C sort -u > out.txt"
    return _Kind(text, {"notes.txt": _text(lines)}, {"out.txt": _text(kept)}, shell)


def totals(random: Random, level: int) -> _Kind:
    rows = [(random.choice(WORDS[:7]), random.randint(1, 999)) for _ in range(4 * SIZES[level])]
    sums, order = Counter[str](), random.choice(["item", "total"])
    for item, amount in rows:
        sums[item] += amount
    ordered = sorted(sums.items(), key=lambda pair: (pair[1] if order == "total" else 0, pair[0]))
    text = "/app/sales.csv has the columns item and amount. Write /app/totals.csv with the columns item and total, the "
    text += f"sum of each item's amounts, sorted by {order}" + (" and then item." if order == "total" else ".")
    keys = "-k2,2n -k1,1" if order == "total" else "-k1,1"
    shell = "echo item,total > totals.csv\nawk -F, 'NR > 1 { s[$1] += $2 } END { for (i in s) print i \",\" s[i] }' "
    files = {"sales.csv": _text(["item,amount", *(f"{item},{amount}" for item, amount in rows)])}
    wanted = _text(["item,total", *(f"{item},{total}" for item, total in ordered)])
    return _Kind(text, files, {"totals.csv": wanted}, f"{shell} sales.csv | LC_ALL=C sort -t, {keys} >> totals.csv")


def edit_json(random: Random, level: int) -> _Kind:
    document = {word: {"size": random.randint(1, 999), "on": False} for word in random.sample(WORDS, SIZES[level])}
    changed, code, told = json.loads(json.dumps(document)), "", list[str]()
    for word in random.sample(sorted(document), 1 + level):
        changed[word]["size"] = size = random.randint(1000, 9999)
        code, told = f"{code}; d['{word}']['size'] = {size}", [*told, f"{word}.size to {size}"]
    text = f"In /app/settings.json set {', '.join(told)}; keep the order of keys, indent by 2, end with a newline."
    shell = f"python3 -c \"import json; d = json.load(open('settings.json')){code}\n"
    shell += "open('settings.json', 'w').write(json.dumps(d, indent=2) + chr(10))\""
    before, after = ((json.dumps(one, indent=2) + "\n").encode() for one in (document, changed))
    return _Kind(text, {"settings.json": before}, {"settings.json": after}, shell)


def count_errors(random: Random, level: int) -> _Kind:
    severity, files, counts = random.choice(["ERROR", "WARN"]), dict[str, bytes](), Counter[str]()
    for number in range(2 + level):
        rows = [(random.choice(["ERROR", "WARN", "INFO"]), random.choice(WORDS[:5])) for _ in range(2 * SIZES[level])]
        counts.update(service for kind, service in rows if kind == severity)
        lines = [f"{random.randint(10, 23)}:{random.randint(10, 59)} {kind} {name}: no ERROR" for kind, name in rows]
        files[f"{_place(random, level)}day{number}.log"] = _text(lines)
    text = f"Count the {severity} lines (second column) of all .log files under /app by service (third column, without "
    text += "its colon). Write lines of service and count, with a space between, by service, to /app/counts.txt."
    shell = f'find . -name \'*.log\' -exec cat {{}} + | awk \'$2 == "{severity}" {{ sub(":", "", $3); c[$3]++ }} '
    shell += "END { for (s in c) print s, c[s] }' | LC_ALL=C sort > counts.txt"
    return _Kind(text, files, {"counts.txt": _text([f"{name} {counts[name]}" for name in sorted(counts)])}, shell)


def unpack(random: Random, level: int) -> _Kind:
    inner, junk, folder = _named(random, level, ".txt"), 16 * level, random.choice(WORDS)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in inner.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    whole = random.randbytes(junk) + gzip.compress(packed.getvalue(), mtime=0)
    how = f", which somebody has put {junk} bytes of noise in front of" if junk else ""
    text = f"Unpack the archive /app/files.tar.gz{how}, into the folder /app/{folder}, and delete the archive."
    shell = f"mkdir {folder}\ntail -c +{junk + 1} files.tar.gz | tar -xzf - -C {folder}\nrm files.tar.gz"
    changes = {f"{folder}/{path}": data for path, data in inner.items()}
    return _Kind(text, {"files.tar.gz": whole}, {"files.tar.gz": None, **changes}, shell)


def link_newest(random: Random, level: int) -> _Kind:
    versions, stem = random.sample(range(1, 200), SIZES[level]), random.choice(WORDS)
    files = {f"{stem}-{version}.sh": f"echo {random.getrandbits(40)}\n".encode() for version in versions}
    newest = f"{stem}-{max(versions)}.sh"
    even = frozenset(f"{stem}-{version}.sh" for version in versions if version % 2 == 0)
    text = f"In /app make those {stem}-NUMBER.sh whose number is even executable, and make /app/{stem}-latest a "
    text += f"symbolic link to the one with the largest number, by the relative target {stem}-NUMBER.sh."
    shell = f"for f in {stem}-*[02468].sh; do [ ! -e $f ] || chmod +x $f; done\n"
    shell += f"ln -s $(ls {stem}-*.sh | sort -t- -k2 -n | tail -1) {stem}-latest"
    return _Kind(text, files, {f"{stem}-latest": newest}, shell, even)


def mend_script(random: Random, level: int) -> _Kind:
    numbers, factor = [random.randint(1, 99) for _ in range(SIZES[level])], random.randint(2, 99)
    total = f"total=$((total + n * {factor}))"
    wrong = random.choice(["total=$((n * {}))", "total=$((total - n * {}))", "totl=$((total + n * {}))"]).format(factor)
    script = ["total=0", "while read -r n; do", f"  {wrong}", "done < numbers.txt", "echo $total > sum.txt"]
    text = f"/app/sum.sh should add up {factor} times each number of /app/numbers.txt and write the sum to "
    text += "/app/sum.txt, but gives a wrong one. Mend it and run it in /app; what counts is that sum.txt is right."
    shell = f"sed -i '3s/.*/  {total}/' sum.sh\nbash sum.sh"
    files = {"sum.sh": _text(script), "numbers.txt": _text([str(number) for number in numbers])}
    return _Kind(text, files, {"sum.txt": f"{factor * sum(numbers)}\n".encode()}, shell, loose="sum.sh")


def merge_settings(random: Random, level: int) -> _Kind:
    layers = list[dict[str, str]]()
    for _ in range(2 + level):
        layers.append({f"{key}.{random.randint(1, 3)}": str(random.randint(1, 99)) for key in WORDS[: SIZES[level]]})
    names = [f"{number}-{random.choice(WORDS)}.conf" for number in range(len(layers))]
    merged = {key: value for layer in layers for key, value in layer.items()}
    files = {name: _text([f"{k}={v}" for k, v in layer.items()]) for name, layer in zip(names, layers, strict=True)}
    text = f"Merge {', '.join(f'/app/{name}' for name in names)}, of lines key=value, into /app/merged.conf: each key "
    text += "once, with its value in the last of these files that has it, sorted by key. Then delete the merged files."
    shell = f"cat {' '.join(names)} | awk -F= '{{ v[$1] = $2 }} END {{ for (k in v) print k \"=\" v[k] }}' "
    shell += f"| LC_ALL=C sort -t= -k1,1 > merged.conf\nrm {' '.join(names)}"
    wanted = _text([f"{key}={merged[key]}" for key in sorted(merged)])
    return _Kind(text, files, {**dict.fromkeys(names), "merged.conf": wanted}, shell)


def duplicates(random: Random, level: int) -> _Kind:
    names = sorted(random.sample([f"{word}{number}.bin" for word in WORDS for number in range(10, 99)], SIZES[level]))
    contents = [f"{random.getrandbits(64):x}\n".encode() for _ in range(len(names) // 2)]
    files = {name: random.choice(contents) for name in names}
    kept = {data: name for name, data in sorted(files.items(), reverse=True)}
    sums = [f"{hashlib.sha256(files[name]).hexdigest()}  {name}" for name in sorted(kept.values())]
    gone = {name: None for name in names if name not in kept.values()}
    text = "Of the .bin files in /app with equal contents, keep the one whose name comes first and delete the others. "
    text += "Then write what sha256sum prints for those that are left, in the order of their names, to /app/sums.txt."
    shell = "sha256sum *.bin | LC_ALL=C sort -k1,1 -k2,2 | awk 'seen[$1]++ { print $2 }' | xargs -r rm\n"
    return _Kind(text, files, {**gone, "sums.txt": _text(sums)}, shell + "LC_ALL=C sha256sum *.bin > sums.txt")


KINDS: tuple[Callable[[Random, int], _Kind], ...] = (
    rename, filter_lines, totals, edit_json, count_errors, unpack, link_newest, mend_script, merge_settings, duplicates
)  # fmt: skip
