"""Settings of `glm5 bench off-policy`."""

from typing import Annotated

from glm5.config.command import Command, Count, Positional


class BenchOffPolicyConfig(Command):
    """Rewards by algorithm and staleness of rollouts, and by how often weights are pushed and the optimizer is reset.
    Each cell has its own learning rate, and five seeds. The same command goes on with what is missing."""

    recipe: Annotated[str, Positional()] = "recipes/rl-off-policy.toml"
    """TOML file."""
    set: tuple[str, ...] = ()
    """KEY=VALUE: a value of the recipe by its path, such as steps=60."""
    rows: str = ""
    """Only algorithms whose name begins so, such as dis. Default: all."""
    jobs: Count = 1
    """Runs at the same time, each on about a core."""
    out: str = "runs/off-policy"
    """Folder of runs.jsonl, a line a run."""
