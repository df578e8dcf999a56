"""The algorithms by name: advantages, the weight of a token, and what is averaged over.

    sequence-mean   the mean over a rollout's sampled tokens, then over rollouts (of equal groups: over groups, too)
    token-mean      the mean over all sampled tokens of the step

Masked tokens count in both.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import Literal

from glm5.common.errors import ConfigError
from glm5.rl.algorithms import weights
from glm5.rl.algorithms.advantages import Advantages, batch_mean, group_mean, group_mean_std
from glm5.rl.algorithms.ratios import Ratios
from glm5.rl.algorithms.weights import Weights

Reduction = Literal["sequence-mean", "token-mean"]


@dataclass(frozen=True)
class Preset:
    """`needs_old`: it compares with the trainer's own earlier pass, which must be made before the first of several
    optimizer steps on a batch. `parameters`: other values than the defaults of `function`. `advantages`: None
    where a critic gives each token its own (rl/training/critic.py)."""

    advantages: Advantages | None
    function: Callable[..., Weights]
    reduction: Reduction
    needs_old: bool
    parameters: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def defaults(self) -> dict[str, float]:
        """The parameters that it has, with their values."""
        found = inspect.signature(self.function).parameters.values()
        own = {one.name: one.default for one in found if one.kind is inspect.Parameter.KEYWORD_ONLY}
        return own | dict(self.parameters)

    def weigh(self, of: Ratios) -> Weights:
        return partial(self.function, **self.parameters)(of)


PRESETS: dict[str, Preset] = {
    "grpo": Preset(group_mean_std, weights.icepop, "sequence-mean", needs_old=True),
    "grpo-no-std": Preset(group_mean, weights.icepop, "sequence-mean", needs_old=True),
    "dis": Preset(group_mean, weights.dis, "token-mean", needs_old=False),
    "sao": Preset(None, weights.dis, "token-mean", needs_old=False),
    "gspo": Preset(group_mean_std, weights.gspo, "sequence-mean", needs_old=True),
    "cispo": Preset(group_mean_std, weights.cispo, "token-mean", needs_old=True),
    "dppo": Preset(group_mean, weights.dppo, "token-mean", needs_old=False),
    "kpop": Preset(group_mean_std, weights.kpop, "sequence-mean", needs_old=True),
    "flash-reinforce": Preset(batch_mean, weights.flash_reinforce, "sequence-mean", needs_old=False),
    "tis": Preset(group_mean_std, weights.tis, "sequence-mean", needs_old=True),
    "reinforce": Preset(group_mean, weights.reinforce, "token-mean", needs_old=False),
    # That of "grpo"; what a teacher has scored gets its advantages from there (distillation.py), the rest keeps these.
    "distill": Preset(group_mean_std, weights.icepop, "sequence-mean", needs_old=True),
}


def preset_of(name: str, parameters: Mapping[str, float] | None = None) -> Preset:
    """The preset `name` with other values of some parameters. Raises ConfigError for a name that it does not have."""
    if name not in PRESETS:
        raise _unknown("algorithm", name, PRESETS)
    preset = PRESETS[name]
    for key in parameters or {}:
        if key not in preset.defaults:
            raise _unknown(f"parameter of {name}", key, preset.defaults)
    return replace(preset, parameters=dict(parameters or {}))


def _unknown(what: str, name: str, known: Mapping[str, object]) -> ConfigError:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ConfigError(f"unknown {what}: {name}; {hint}allowed: {', '.join(known)}")
