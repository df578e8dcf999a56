"""The record of a rollout, in the shape of verifiers' traces (0.4.0, v1/trace.py and v1/graph.py), as JSON.

    nodes            the segments: token_ids, mask (which of them were sampled); of sampled tokens logprobs, and beside
                     them what the trainer computed: trainer_logprobs, advantages, entropies, loss_weights
    task, rewards, metrics, errors, timing, stop_condition        as there
    info             what verifiers has no place for

Further than there: a node has the weights' `versions` of its tokens and `masked`, the tokens that the algorithm left
out; floats have all their digits, so that a training step can be repeated from the record.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta, Struct, field
from numpy.typing import NDArray

from glm5.common.errors import DataError
from glm5.rl.environments.protocol import FailureKind, Message, Task
from glm5.rl.rollout import Rollout
from glm5.rl.segments import Segment, SegmentTree

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Columns = Mapping[str, Sequence[float]]
"""What the trainer computed of a segment's tokens, by the name of a node's field; "weights" are its loss_weights."""
StepColumns = Sequence[Sequence[Sequence[Columns | None]]]
"""Of a step's groups, rollouts and segments; None of those that were not trained."""


class Array(Struct):
    """A whole-number array, its bytes in base64."""

    dtype: Literal["int16", "int32"]
    shape: Annotated[list[Annotated[int, Meta(ge=0, lt=2**31)]], Meta(max_length=3)]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any], dtype: Literal["int16", "int32"]) -> "Array":
        return cls(dtype, list(array.shape), np.ascontiguousarray(array, f"<i{int(dtype[3:]) // 8}").tobytes())

    def numpy(self) -> NDArray[Any]:
        """ValueError where shape and bytes do not fit."""
        return np.frombuffer(self.data, f"<i{int(self.dtype[3:]) // 8}").astype(self.dtype).reshape(self.shape)


class SamplingMask(Struct):
    """The kept vocabulary of each token: the words of all masks (`kept_ids`) in a row, and how many are of each."""

    ids: Array
    counts: Array


class Node(Struct, omit_defaults=True):
    """A segment."""

    token_ids: list[Token]
    mask: list[bool]
    parent: Token | None = None
    message: dict[str, Any] = {}
    sampled: bool = False
    logprobs: list[float] = []
    advantages: list[float] | None = None
    reference_logprobs: list[float] | None = None
    trainer_logprobs: list[float] | None = None
    entropies: list[float] | None = None
    loss_weights: dict[str, list[float]] | None = None
    masked: list[bool] | None = None
    versions: list[Int] = []
    key_versions: list[Int] = []
    context_versions: list[tuple[Int, Token]] = []
    routed_experts: Array | None = None
    sampling_mask: SamplingMask | None = None
    teacher_logprobs: list[float] = []
    teacher_top: list[list[tuple[Token, float]]] = []

    def segment(self) -> Segment:
        kept = None
        if self.sampling_mask is not None:
            words, counts = self.sampling_mask.ids.numpy().astype("<i4"), self.sampling_mask.counts.numpy().tolist()
            if min(counts, default=0) < 0 or sum(counts) != len(words):
                raise ValueError(f"{len(words)} kept ids, counts of {sum(counts)}")
            ends = np.cumsum(counts).tolist()
            kept = [words[end - count : end].tobytes() for end, count in zip(ends, counts, strict=True)]
        experts = None if self.routed_experts is None else self.routed_experts.numpy()
        if experts is not None and (experts.ndim != 3 or len(experts) > len(self.token_ids)):
            raise ValueError(f"experts of shape {experts.shape} for {len(self.token_ids)} tokens")
        columns = (self.logprobs, self.versions, self.key_versions, self.context_versions)
        taught = self.teacher_logprobs, self.teacher_top
        return Segment(self.token_ids, self.parent, self.sampled, *columns, experts, kept, *taught)


class TaskData(Struct):
    seed: Int
    level: Int
    messages: list[dict[str, Any]]
    data: dict[str, Any]
    tools: list[dict[str, Any]]


class TraceTask(Struct):
    """`type`: the environment. `key`: the task's hash."""

    type: str
    data: TaskData
    key: str


class Reward(Struct):
    score: float
    weight: float = 1.0


class Failure(Struct):
    type: str
    message: str


class Span(Struct):
    start: float
    end: float


class Timing(Struct):
    agent: Span


class Agent(Struct):
    config: dict[str, Any] = {}
    name: str = "policy"
    trainable: bool = True


class Info(Struct):
    """Fields of Rollout; `group`: which of the step's groups, from 0, and `number` its place in the run."""

    group: int
    number: Int
    seed: int
    temperature: float
    top_p: float
    top_k: Int
    min_p: float
    num_turns: Int
    messages: list[dict[str, Any]]
    is_withheld: bool = False
    environment_seconds: float = 0.0
    teacher: str = ""


class Trace(Struct):
    """A rollout. `stop_condition`: "done", "truncated" or "failed"."""

    id: str
    task: TraceTask
    nodes: list[Node]
    rewards: dict[str, Reward]
    metrics: dict[str, float | None]  # None where an older version wrote what is no finite number
    info: Info
    stop_condition: str
    ok: bool
    is_truncated: bool
    timing: Timing
    errors: list[Failure] = []
    agent: Agent = field(default_factory=Agent)
    is_completed: bool = True
    version: int = 1

    @property
    def reward(self) -> float:
        return sum(one.score for one in self.rewards.values())

    def rollout(self) -> Rollout:
        """The rollout as it was. Raises ValueError for an inconsistent one."""
        of, info, failure = self.task.data, self.info, self.errors[0] if self.errors else None
        task = Task(self.task.type, of.seed, of.level, tuple(of.messages), of.data, tuple(of.tools))
        tree = SegmentTree()
        for node in self.nodes:
            tree.add(node.segment())
        return Rollout(
            task,
            info.seed,
            tree,
            cast("list[Message]", info.messages),
            {name: one.score for name, one in self.rewards.items()},
            {name: math.nan if value is None else value for name, value in self.metrics.items()},
            *(info.temperature, info.top_p, info.top_k, info.min_p, info.num_turns),
            self.is_truncated,
            info.is_withheld,
            None if failure is None else msgspec.convert(failure.type, FailureKind),
            "" if failure is None else failure.message,
            info.teacher,
            self.timing.agent.end,
            info.environment_seconds,
        )


def trace_of(rollout: Rollout, name: str, group: int, number: int, columns: Sequence[Columns | None]) -> Trace:
    """The record of a rollout, `name` its id. `columns`: of each segment, None of those that were not trained."""
    task = rollout.task
    data = TaskData(task.seed, task.level, _plain(task.messages), dict(task.data), _plain(task.tools))
    messages = _of_segments(rollout)
    nodes = [
        _node(segment, message, of)
        for segment, message, of in zip(rollout.tree.segments, messages, columns, strict=True)
    ]
    sampling = (rollout.temperature, rollout.top_p, rollout.top_k, rollout.min_p)
    failed = rollout.failure is not None
    return Trace(
        id=name,
        task=TraceTask(task.environment, data, task.key),
        nodes=nodes,
        rewards={part: Reward(score) for part, score in rollout.rewards.items()},
        metrics=dict(rollout.metrics),
        info=Info(
            *(group, number, rollout.seed, *sampling, rollout.num_turns, _plain(rollout.messages)),
            *(rollout.is_withheld, rollout.environment_seconds, rollout.teacher),
        ),
        stop_condition="failed" if failed else "truncated" if rollout.is_truncated else "done",
        ok=not failed,
        is_truncated=rollout.is_truncated,
        timing=Timing(Span(0.0, rollout.seconds)),
        errors=[Failure(str(rollout.failure), rollout.failure_reason)] if failed else [],
    )


def as_json(value: Struct) -> bytes:
    """A line of JSON, with NaN and Infinity as Python writes them."""
    with suppress(UnicodeEncodeError):
        line = msgspec.json.encode(value) + b"\n"
        if b"null" not in line:
            return line
    # Half of a character, or perhaps what is no finite number: this module writes both, five times as slowly.
    return json.dumps(msgspec.to_builtins(value), separators=(",", ":")).encode() + b"\n"


def from_json(line: bytes, kind: type[Any], place: str) -> Any:
    """The checked value of a line. Raises DataError naming `place`."""
    try:
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(line, type=kind)
        return msgspec.convert(json.loads(line), kind)  # halves of characters; or it says what is wrong
    except (ValueError, RecursionError) as error:  # msgspec.ValidationError is a ValueError
        raise DataError(f"{place}: no record of a rollout: {error}") from None


def _node(segment: Segment, message: Message, columns: Columns | None) -> Node:
    count = len(segment.token_ids)
    node = Node(segment.token_ids, [segment.is_sampled] * count, segment.parent, dict(message), segment.is_sampled)
    node.logprobs, node.versions, node.context_versions = segment.logprobs, segment.versions, segment.context_versions
    node.teacher_logprobs, node.teacher_top = segment.teacher_logprobs, segment.teacher_top
    node.key_versions = segment.key_versions if segment.key_versions != segment.versions else []
    if segment.experts is not None:
        node.routed_experts = Array.of(segment.experts, "int16")
    if segment.kept is not None:
        counts = np.array([len(mask) // 4 for mask in segment.kept], np.int64)
        words = np.frombuffer(b"".join(segment.kept), "<i4")
        node.sampling_mask = SamplingMask(Array.of(words, "int32"), Array.of(counts, "int32"))
    for name, values in (columns or {}).items():
        match name:
            case "weights":
                node.loss_weights = {"policy": list(values)}
            case "masked":
                node.masked = [bool(one) for one in values]
            case _:
                setattr(node, name, list(values))
    return node


def _of_segments(rollout: Rollout) -> list[Message]:
    """Of each segment its message: a reply, or the last of what came before the next one. Without texts where messages
    and segments do not fit each other."""
    segments, replies = rollout.tree.segments, [one for one in rollout.messages if one.get("role") == "assistant"]
    if len(replies) != sum(segment.is_sampled for segment in segments):
        return [{"role": "assistant" if one.is_sampled else "user", "content": ""} for one in segments]
    found: list[Message] = []
    left = list(rollout.messages)
    for segment in segments:
        taken: Message = {"role": "user", "content": ""}
        while left and (left[0].get("role") == "assistant") == segment.is_sampled:
            taken = left.pop(0)
            if segment.is_sampled:
                break
        found.append(taken)
    return found


def _plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(one) for one in messages]
