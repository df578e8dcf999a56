"""A small simulated shell: remove, move or copy the one file of a given size, which only `ls` tells.

    remove 7 | move 7 to 2     what is asked ("copy" as well); 7 is a size, 2 a folder. The shell starts in folder 1
    ls         a 6 d 7 e 5     its files with their sizes; from level 1 on all folders: 1 a 6 2 3 d 7 e 5
    cd 2 | rm d | mv d 2 | cp d 2      ok. A command that cannot be done ends the shell, as in scripts with set -e

The reward is 1 if at the end every folder holds what it should, else 0. The end is when that is so, at an error, or
after so many commands. A file that was removed or moved wrongly cannot be had back: whoever never looks is right for
one task of six at level 0, whoever does not read the sizes for one of three.
"""

import re
from collections.abc import Sequence
from itertools import combinations, permutations, product
from random import Random
from typing import Any, NamedTuple

from glm5.rl.environments.families import Family
from glm5.rl.environments.protocol import Episode, Playable, Reply, Task, Turn

NAMES, SIZES = "abcdef", "56789"
VERBS = {"rm": "remove", "mv": "move", "cp": "copy"}
_COMMAND = re.compile(r"ls|cd ([1-9])|rm ([a-z])|(mv|cp) ([a-z]) ([1-9])")


class _Level(NamedTuple):
    """`is_spread`: files lie in all folders, not in the first alone."""

    num_files: int
    num_folders: int
    is_spread: bool


LEVELS = (_Level(3, 2, is_spread=False), _Level(4, 3, is_spread=True), _Level(5, 4, is_spread=True))
NUM_TURNS = 4


def _family(level: _Level) -> Family:
    """All tasks: what is to be done with which file, of which sizes and names files are and where."""
    files, folders = level.num_files, range(1, level.num_folders + 1)
    grid = {
        "change": [("rm", 0), *product(("mv", "cp"), folders[:-1])],
        "index": range(files),
        "sizes": list(permutations(SIZES, files)),
        "names": list(combinations(NAMES, files)),
        "folders": list(product(folders if level.is_spread else [1], repeat=files)),
    }
    return Family(dict, grid)


class TinyTerminal(Playable):
    """The first seeds of a level, 10,800 at the easiest, are all different tasks."""

    name, levels, num_turns, is_quick = "tiny-terminal", len(LEVELS), NUM_TURNS, True

    def __init__(self) -> None:
        self._tasks = [_family(level) for level in LEVELS]

    def task(self, seed: int, level: int) -> Task:
        point = self._tasks[level].point(seed)
        (verb, step), index = point["change"], point["index"]
        start, size = point["folders"][index], point["sizes"][index]
        target = 1 + (start - 1 + step) % LEVELS[level].num_folders
        asked = f"{VERBS[verb]} {size}" + (f" to {target}" if step else "")
        act = f"{verb} {point['names'][index]}" + (f" {target}" if step else "")
        files = [list(file) for file in zip(point["names"], point["sizes"], point["folders"], strict=True)]
        data = {"files": files, "way": ["ls", *([f"cd {start}"] if start != 1 else []), act]}
        return Task(self.name, seed, level, ({"role": "user", "content": asked},), data)

    def reset(self, task: Task) -> "ShellEpisode":
        return ShellEpisode(task)

    def oracle(self, task: Task) -> Sequence[Reply]:
        return [Reply(command) for command in task.data["way"]]

    def random_reply(self, task: Task, random: Random, asked: str) -> Reply:
        name, folder = random.choice(task.data["files"])[0], random.randint(1, LEVELS[task.level].num_folders)
        return Reply(random.choice(["ls", f"cd {folder}", f"rm {name}", f"mv {name} {folder}", f"cp {name} {folder}"]))


class _Shell:
    """The simulated one: which files lie where, and where it is itself."""

    def __init__(self, files: Sequence[tuple[str, str, int]], level: _Level) -> None:
        self.folders = {folder: dict[str, str]() for folder in range(1, level.num_folders + 1)}
        for name, size, folder in files:
            self.folders[folder][name] = size
        self._at, self._is_spread = 1, level.is_spread

    def run(self, said: str) -> str:
        """Raises LookupError for what cannot be done, ValueError for what is no command."""
        if not (found := _COMMAND.fullmatch(said)):
            raise ValueError
        folder, removed, verb, name, target = found.groups()
        here = self.folders[self._at]
        if said == "ls":
            shown = self.folders if self._is_spread else {"": here}
            words = [str(word) for at, files in shown.items() for word in (at, *sum(sorted(files.items()), ()))]
            return " ".join(words).strip() or "ok"
        if folder:
            if int(folder) not in self.folders:
                raise LookupError
            self._at = int(folder)
        elif removed:
            del here[removed]
        else:
            there, size = self.folders[int(target)], here[name]
            if name in there:
                raise LookupError
            there[name] = size
            if verb == "mv":
                del here[name]
        return "ok"


class ShellEpisode(Episode):
    """One shell. A reply that is no command ends it with reward 0."""

    def __init__(self, task: Task) -> None:
        self.messages = task.messages
        level = LEVELS[task.level]
        self._shell, wanted = _Shell(task.data["files"], level), _Shell(task.data["files"], level)
        for command in task.data["way"]:
            wanted.run(command)
        self._wanted: dict[int, Any] = wanted.folders
        self._said = list[str]()

    def step(self, reply: Reply) -> Turn:
        self._said.append(reply.content.strip())
        answer, is_legal = "", True
        try:
            answer = self._shell.run("" if reply.is_truncated else self._said[-1])
        except LookupError:
            pass
        except ValueError:
            is_legal = False
        is_right = bool(answer) and self._shell.folders == self._wanted
        if answer and not is_right and len(self._said) < NUM_TURNS:
            return Turn(({"role": "user", "content": answer},))
        figures = {"commands": len(self._said), "looks": self._said.count("ls"), "illegal": not is_legal}
        metrics = {name: float(value) for name, value in figures.items()}
        return Turn(is_done=True, rewards={"state": float(is_right)}, metrics=metrics)
