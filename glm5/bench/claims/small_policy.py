"""Reinforcement learning in a second a seed: sorting four digits by a small network, with the weight functions, the
advantages and the repair of groups of `glm5/rl`, and an engine that is planted.

The policy is an embedding of the digits, a hidden layer and the logits of the four places of the answer. A step has 16
groups of 16 answers to new tasks; an answer earns the share of places that are right. What counts is that share in
expectation over 2,000 held-out tasks, after the last step. Keys of an arm, KEY=VALUE:

    algorithm, beta, ...   of glm5/rl/algorithms      kl          factor of a KL divergence to the start
    noise                  of each weight of the engine, relative    bits    fp8 or int4: as the engine holds weights
    staleness, push_every  age of the engine's weights in pushes, and steps between pushes
    reset                  the optimizer's state, after each push    fail    share of answers whose environment fails
    repair                 false: a failure is a reward of 0         lr      of Adam
"""

import copy
from collections import deque
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glm5.quant.qat import int4
from glm5.rl.algorithms.ratios import Ratios
from glm5.rl.algorithms.table import preset_of
from glm5.rl.environments.protocol import Task
from glm5.rl.rollout import Group, Rollout
from glm5.rl.segments import Segment
from glm5.rl.training.repair import repair

DIGITS, PLACES, WIDTH = 10, 4, 128
GROUPS, SIZE, STEPS = 16, 16, 400
HELD_OUT = 2000
DEFAULTS = {
    "algorithm": "grpo",
    "kl": "0",
    "noise": "0",
    "bits": "",
    "staleness": "0",
    "push_every": "1",
    "reset": "false",
    "fail": "0",
    "repair": "true",
    "lr": "3e-3",
}


class _Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIGITS * PLACES, 32)
        self.hidden, self.head = nn.Linear(32 * PLACES, WIDTH), nn.Linear(WIDTH, DIGITS * PLACES)

    def forward(self, task_NP: Tensor) -> Tensor:
        """Log-probabilities [N, places, digits]."""
        x_NE = self.embed(task_NP + DIGITS * torch.arange(PLACES)).flatten(1)
        return self.head(F.gelu(self.hidden(x_NE))).unflatten(1, (PLACES, DIGITS)).log_softmax(-1)


def small_policy(_recipe: str | None, settings: tuple[str, ...], seed: int, _folder: Path) -> dict[str, float]:
    """`reward`: of the last weights in expectation; `half`: after half of the steps; `masked`, `entropy`: means."""
    given = dict(one.split("=", 1) for one in settings)
    arm = DEFAULTS | given
    preset = preset_of(arm["algorithm"], {name: float(given[name]) for name in given if name not in DEFAULTS})
    gen = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, count = _Policy(), GROUPS * SIZE
    start = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=float(arm["lr"]), betas=(0.9, 0.95))
    pushed = deque([_engine(model, arm, gen)], maxlen=int(arm["staleness"]) + 1)
    masked = entropy = half = 0.0
    for step in range(STEPS):
        task_NP = _tasks(GROUPS, gen).repeat_interleave(SIZE, 0)
        with torch.no_grad():
            there_NPD = pushed[0](task_NP)
        said_NP = torch.multinomial(there_NPD.exp().flatten(0, 1), 1, generator=gen).view(count, PLACES)
        reward_N = (said_NP == task_NP.sort(1).values).double().mean(1)
        fails_N = torch.rand(count, generator=gen) < float(arm["fail"])
        reward_N[fails_N] = 0.0
        if arm["repair"] == "false":
            fails_N[:] = False
        kept_N, copies_N = _repaired(reward_N, fails_N)
        here_NPD = model(task_NP)
        logp_NP = here_NPD.gather(2, said_NP[..., None])[..., 0]
        advantage_N = torch.zeros(count, dtype=torch.float64)
        assert preset.advantages is not None, "no critic here"
        advantage_N[kept_N] = preset.advantages(reward_N[kept_N], torch.arange(count)[kept_N] // SIZE)
        rollout_NP = there_NPD.gather(2, said_NP[..., None])[..., 0]
        own = logp_NP.detach().flatten()
        sequence_T = torch.arange(count).repeat_interleave(PLACES)
        advantage_T = advantage_N.float().repeat_interleave(PLACES)
        weights = preset.weigh(Ratios(own, own, rollout_NP.flatten(), advantage_T, sequence_T, count))
        unit_T = copies_N.repeat_interleave(PLACES)
        loss = -(unit_T * weights.weight_T * logp_NP.flatten()).sum() / unit_T.sum().clamp_min(1)
        if float(arm["kl"]):
            with torch.no_grad():
                first_NPD = start(task_NP)
            loss = loss + float(arm["kl"]) * (here_NPD.exp() * (here_NPD - first_NPD)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % int(arm["push_every"]) == 0:
            pushed.append(_engine(model, arm, gen))
            if arm["reset"] == "true":
                optimizer.state.clear()
        masked += weights.masked_T.double().mean().item() / STEPS
        entropy += -(here_NPD.exp() * here_NPD).sum(-1).mean().item() / STEPS
        if step + 1 == STEPS // 2:
            half = _reward(model, seed)
    return {"reward": _reward(model, seed), "half": half, "masked": masked, "entropy": entropy}


def _tasks(count: int, gen: torch.Generator) -> Tensor:
    """Different digits each."""
    return torch.rand(count, DIGITS, generator=gen).argsort(1)[:, :PLACES]


@torch.no_grad()
def _reward(model: _Policy, seed: int) -> float:
    task_NP = _tasks(HELD_OUT, torch.Generator().manual_seed(10**6 + seed))
    return model(task_NP).exp().gather(2, task_NP.sort(1).values[..., None]).double().mean().item()


def _engine(model: _Policy, arm: dict[str, str], gen: torch.Generator) -> _Policy:
    """A copy of the weights, as the engine holds them."""
    there = copy.deepcopy(model)
    for weight in there.parameters():
        if weight.dim() < 2:
            continue
        if arm["bits"] == "fp8":
            scale = weight.data.abs().amax() / 448
            weight.data = (weight.data / scale).to(torch.float8_e4m3fn).float() * scale
        elif arm["bits"] == "int4":
            weight.data = int4(weight.data, 32).dequantize(torch.float32)
        weight.data *= 1 + float(arm["noise"]) * torch.randn(weight.shape, generator=gen)
    return there


def _repaired(reward_N: Tensor, fails_N: Tensor) -> tuple[Tensor, Tensor]:
    """Which answers are trained [N], and how often each one counts, 0 for the others."""
    if not fails_N.any():
        return ~fails_N, torch.ones(len(fails_N))
    task, made = Task("sort", 0, 0, (), {}), list[Group]()
    for number in range(GROUPS):
        rollouts: list[Rollout] = []
        for place in range(number * SIZE, (number + 1) * SIZE):
            failure = "environment" if fails_N[place] else None
            rollouts.append(Rollout(task, place, rewards={"": reward_N[place].item()}, failure=failure))
            rollouts[-1].tree.add(Segment([0], None, is_sampled=True, logprobs=[0.0], versions=[0]))
        made.append(Group(number, task, rollouts))
    copies_N = torch.zeros(len(reward_N))
    for group in repair(made)[0]:
        for rollout, copies in zip(group.rollouts, group.copies, strict=True):
            copies_N[rollout.seed] = copies
    return copies_N > 0, copies_N
