"""A finished rollout, and a group of rollouts of one task."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from glm5.rl.environments.protocol import EXCLUDED, FailureKind, Message, Task
from glm5.rl.segments import SegmentTree


@dataclass
class Rollout:
    """One attempt at a task by the policy: its tokens, what it earned, and how it ended.

    `rewards`: named parts, whose sum is `reward`. `failure`: why it could not be finished, by a fault that it did not
    cause. `teacher`: the name of the one that has scored its sampled tokens. `is_withheld`: its reward counts in its
    group, and none of its tokens is trained. `temperature`, `top_p`, `top_k`, `min_p`: of its sampling. `seed`: of its
    first request; unique in a run. `environment_seconds`: the part of its `seconds` in which it waited for its
    environment; 0 for an agent that is a program.
    """

    task: Task
    seed: int
    tree: SegmentTree = field(default_factory=SegmentTree)
    messages: list[Message] = field(default_factory=list[Message])
    rewards: dict[str, float] = field(default_factory=dict[str, float])
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    num_turns: int = 0
    is_truncated: bool = False
    is_withheld: bool = False
    failure: FailureKind | None = None
    failure_reason: str = ""
    teacher: str = ""
    seconds: float = 0.0
    environment_seconds: float = 0.0

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())

    @property
    def is_valid(self) -> bool:
        """Whether it may be trained on: it did not fail by a fault that its actions did not cause."""
        return self.failure not in EXCLUDED


@dataclass
class Group:
    """Rollouts of one task. `number`: position of the group among all of the run, from 0."""

    number: int
    task: Task
    rollouts: Sequence[Rollout]
