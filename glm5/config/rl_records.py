"""Flags of the commands that read what `glm5 rl` has recorded: view, replay and export."""

from typing import Annotated

from pydantic import Field

from glm5.config.command import Command, Count, Positional
from glm5.config.recipe import Share


class RLViewConfig(Command):
    """Show a run's curves and rollouts in a browser: groups by reward, and conversations token by token."""

    folder: Annotated[str, Positional()]
    """Folder of the run, also of one that is still going on."""
    host: str = "127.0.0.1"
    """Address to listen at. Anyone who reaches it can read the rollouts."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 8010
    """0: any free one."""


class RLReplayConfig(Command):
    """Redo a training step from its record and the nearest state saved before it; compare the weights to the bit."""

    folder: Annotated[str, Positional()]
    """Folder of the run."""
    step: Annotated[int, Field(ge=1, lt=2**62), Positional()]
    """The step, from 1."""


class RLExportConfig(Command):
    """Write the best conversations of a run as rows for supervised fine-tuning (rejection sampling).

    Turns that failed stay in them as context, with "weight": 0, so that going on from an error is learnt and the error
    is not.
    """

    folder: Annotated[str, Positional()]
    """Folder of the run."""
    out: str
    """JSONL file to write."""
    min_reward: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Least reward of a kept conversation."""
    best: Count | None = None
    """The most kept conversations of a task; of equal rewards the shorter ones. Default: all."""
    last_steps: Count | None = None
    """Only of so many recorded steps, the last ones. Default: all."""
    keep_thinking: Share = 1.0
    """Share of the turns, drawn by the rollout's seed, whose thinking is kept; the others are taught without any."""
