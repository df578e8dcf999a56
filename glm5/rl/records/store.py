"""The records of a run: a file for each step, and the saved states from which a step can be repeated.

    OUT/records/step-00000012.jsonl.gz     of the 12th step: a line that says what it holds (`Head`), then its rollouts
    OUT/records/state-00000010.pt          the run's state after 10 steps, a second name of what was state.pt

Each file is a series of gzip members, one for the head and one for each group, so that a group is read without the
others; `zcat` prints it as JSON lines. Files appear complete or not at all. Rollouts and states take half of the space
each; the oldest are deleted first.
"""

import logging
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

from msgspec import Meta, Struct

from glm5.common.atomic import atomic_write
from glm5.common.bounded import open_regular
from glm5.common.errors import DataError
from glm5.rl.records.trace import Int, StepColumns, Trace, as_json, from_json, trace_of
from glm5.rl.rollout import Group
from glm5.train.state import writing_to

logger = logging.getLogger(__name__)

MAX_HEAD, MAX_GROUP = 2**26, 2**29
"""Bytes of JSON. A step with a larger group is not kept."""
_LEVEL = 1  # of gzip: half the time of level 3, for 4 % more bytes
_NAMES = {"step": re.compile(r"step-(\d{8,18})\.jsonl\.gz"), "state": re.compile(r"state-(\d{8,18})\.pt")}


class GroupHead(Struct):
    """What is known of a group without reading it. `size`: bytes in the file. `rewards`: None where a rollout failed;
    `tokens`: sampled ones of each rollout."""

    number: Int
    environment: str
    key: str
    seed: Int
    level: Int
    size: Annotated[int, Meta(ge=0, lt=2**40)]
    rewards: list[float | None]
    tokens: list[Int]


class Head(Struct):
    """Of a step: its number from 1, the steps of the whole recipe, and the sums of the weights after it by name."""

    step: Annotated[int, Meta(ge=1, lt=2**62)]
    steps: Annotated[int, Meta(ge=1, lt=2**62)]
    weights: dict[str, str]
    groups: list[GroupHead]


class Records:
    """The folder of a run's records, for reading; all methods raise DataError for files that are not as written."""

    def __init__(self, out: Path) -> None:
        self.folder = out / "records"

    def steps(self) -> list[int]:
        """Steps whose rollouts are kept, ascending."""
        return sorted(_numbered(self.folder, "step"))

    def states(self) -> dict[int, Path]:
        """Saved states, by the number of steps that came before."""
        return _numbered(self.folder, "state")

    def head(self, step: int) -> Head:
        with self._open(step) as file:
            return self._head(step, file)

    def group(self, step: int, index: int) -> list[Trace]:
        """The rollouts of one of a step's groups. IndexError where there is no such group."""
        with self._open(step) as file:
            sizes = [one.size for one in self._head(step, file).groups]
            if not 0 <= index < len(sizes):
                raise IndexError(index)
            file.seek(sum(sizes[:index]), os.SEEK_CUR)
            return self._traces(step, file, index)

    def groups(self, step: int) -> Iterator[list[Trace]]:
        """The rollouts of all groups of a step."""
        with self._open(step) as file:
            for index in range(len(self._head(step, file).groups)):
                yield self._traces(step, file, index)

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.jsonl.gz"

    def _open(self, step: int) -> BinaryIO:
        path = self.path(step)
        try:
            return open_regular(path, DataError)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; kept are steps {spans(self.steps())}") from None

    def _head(self, step: int, file: BinaryIO) -> Head:
        return from_json(self._member(step, file, MAX_HEAD), Head, f"{self.path(step)}, its head")

    def _traces(self, step: int, file: BinaryIO, index: int) -> list[Trace]:
        lines = self._member(step, file, MAX_GROUP).splitlines()
        place = f"of group {index} of {self.path(step)}"
        return [from_json(line, Trace, f"rollout {number} {place}") for number, line in enumerate(lines)]

    def _member(self, step: int, file: BinaryIO, limit: int) -> bytes:
        """The text of the gzip member that begins here."""
        unpacker, parts, total = zlib.decompressobj(wbits=31), list[bytes](), 0
        try:
            while not unpacker.eof:
                packed = unpacker.unconsumed_tail or file.read(2**16)
                if not packed:
                    raise EOFError("it ends too early")
                parts.append(unpacker.decompress(packed, limit + 1 - total))
                total += len(parts[-1])
                if total > limit:
                    raise ValueError(f"a part has more than {limit} bytes")
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise DataError(f"{self.path(step)} is damaged: {error}") from None
        file.seek(-len(unpacker.unused_data), os.SEEK_CUR)
        return b"".join(parts)


def read_groups(records: Records, step: int) -> list[Group]:
    """The groups of a step as the trainer got them. Raises DataError."""
    found: list[Group] = []
    for index, traces in enumerate(records.groups(step)):
        try:
            rollouts = [trace.rollout() for trace in traces]
        except ValueError as error:
            raise DataError(f"step {step}, group {index}: {error}") from None
        if not rollouts:
            raise DataError(f"step {step}, group {index}: there is no rollout")
        found.append(Group(traces[0].info.number, rollouts[0].task, rollouts))
    return found


class RecordWriter(Records):
    """Writes them, in at most `max_bytes`; `every`: steps between those that are kept, 0 for none."""

    def __init__(self, out: Path, max_bytes: float, every: int) -> None:
        super().__init__(out)
        self.max_bytes, self.every = max_bytes, every

    def keeps(self, step: int) -> bool:
        return bool(self.every) and step % self.every == 0

    def write(
        self, step: int, steps: int, weights: dict[str, str], groups: Sequence[Group], columns: StepColumns
    ) -> None:
        """Keep a step. Raises TrainingError where it cannot be written."""
        heads: list[GroupHead] = []
        members: list[bytes] = []
        for index, (group, of_group) in enumerate(zip(groups, columns, strict=True)):
            lines = [
                as_json(trace_of(one, f"{step}-{index}-{number}", index, group.number, of))
                for number, (one, of) in enumerate(zip(group.rollouts, of_group, strict=True))
            ]
            if (size := sum(map(len, lines))) > MAX_GROUP:
                logger.warning("step %d is not kept: group %d has %d bytes of JSON", step, index, size)
                return
            members.append(_compress(lines))
            rewards = [one.reward if one.is_valid else None for one in group.rollouts]
            tokens = [one.tree.num_sampled for one in group.rollouts]
            task = group.task
            place = (group.number, task.environment, task.key, task.seed, task.level)
            heads.append(GroupHead(*place, len(members[-1]), rewards, tokens))
        head = _compress([as_json(Head(step, steps, weights, heads))])
        size = len(head) + sum(map(len, members))
        if size > self.max_bytes / 2:
            logger.warning("step %d is not kept: its %d bytes are more than half of records.max_gb", step, size)
            return
        self._make_room("step", size)
        with writing_to(self.path(step)):
            self.folder.mkdir(exist_ok=True)
            with atomic_write(self.path(step), "wb") as handle:
                handle.writelines([head, *members])

    def keep_state(self, file: Path, step: int) -> None:
        """Keep the state after `step` steps, a file that is going to be replaced, under a second name."""
        size = file.stat().st_size
        if not self.every or size > self.max_bytes / 2:
            return
        self._make_room("state", size)
        target = self.folder / f"state-{step:08d}.pt"
        with writing_to(target):
            self.folder.mkdir(exist_ok=True)
            target.unlink(missing_ok=True)
            os.link(file, target)

    def _make_room(self, kind: str, size: int) -> None:
        kept = sorted(_numbered(self.folder, kind).items())
        total = size + sum(path.stat().st_size for _, path in kept)
        for _, path in kept:
            if total <= self.max_bytes / 2:
                break
            total -= path.stat().st_size
            path.unlink()


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers in few words: "1 to 4, 6"; "none"."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in found) or "none"


def _numbered(folder: Path, kind: str) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    found = ((_NAMES[kind].fullmatch(path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _compress(lines: Sequence[bytes]) -> bytes:
    packer = zlib.compressobj(_LEVEL, wbits=31)
    return b"".join([*map(packer.compress, lines), packer.flush()])
