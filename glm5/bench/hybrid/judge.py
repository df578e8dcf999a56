"""A small model as a judge, and its liking for the answer that it sees first, before and after both orders are asked.

It learns A or B from comparisons by people, in which the preferred answer stood first in FIRST of the cases: that is
where its liking comes from. Held-out pairs have a known truth (the true reward of both answers differs).
"""

import asyncio
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from glm5.bench.hybrid.task import Comfort, compared, scored
from glm5.config.rl_reward import JudgeSection
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.rl.build import PolicyBuilder
from glm5.rl.rewards.judge import Judge

FIRST, STEPS, BATCH, LR, NUM_PAIRS, HELD_OUT = 0.7, 150, 64, 1e-3, 4096, 256
PAIRS_FROM = 20_000
"""Seed of the first task whose answers it learns to compare."""


def position_bias(builder: PolicyBuilder, seed: int) -> dict[str, float]:
    """Shares of held-out pairs: right where the better answer is shown first and where it is second, verdicts for the
    first answer; and with both orders asked (`Judge`, mode pairs) right, undecided and wrong."""
    model = builder.model(torch.device("cpu"))
    letters = [builder.tokenizer.encode(letter)[0] for letter in "AB"]
    _learn(model, builder, letters, seed)
    held_out = _known_pairs(seed)
    prompts = [_prompt(task, *order) for task, *pair in held_out for order in (pair, pair[::-1])]
    with torch.no_grad():
        logit_B2 = _logits(model, builder, prompts)[:, letters]
    says = dict(zip(prompts, ["A" if a > b else "B" for a, b in logit_B2.tolist()], strict=True))

    async def ask(_system: str, shown: Any, _temperature: float) -> str:
        return says[_prompt(shown["prompt"].strip('"'), shown["A"], shown["B"])]

    async def play() -> list[float]:
        judge = Judge(JudgeSection(url="http://scripted", mode="pairs"), ask)
        found = [(await judge.values(task, (better, worse))).values[0] for task, better, worse in held_out]
        return [value for value in found if value is not None]

    values, verdicts = asyncio.run(play()), [says[prompt] for prompt in prompts]
    there, back = verdicts[::2], verdicts[1::2]  # the better answer first, and second
    return {
        "right, better first": fmean(one == "A" for one in there),
        "right, better second": fmean(one == "B" for one in back),
        "for the first": fmean(one == "A" for one in verdicts),
        **{
            f"both orders: {name}": fmean(value == of for value in values)
            for name, of in (("right", 1), ("undecided", 0.5), ("wrong", 0))
        },
    }


def _learn(model: Glm5, builder: PolicyBuilder, letters: Sequence[int], seed: int) -> None:
    random, optimizer = Random(f"judge {seed}"), torch.optim.AdamW(model.parameters(), lr=LR)
    rows = list[tuple[str, int]]()
    for chosen, rejected in compared(PAIRS_FROM, NUM_PAIRS, seed + 1000):
        pair = chosen[1]["content"], rejected[1]["content"]
        is_first = random.random() < FIRST
        rows.append((_prompt(chosen[0]["content"], *(pair if is_first else pair[::-1])), letters[not is_first]))
    for step in range(STEPS):
        chosen = [rows[(step * BATCH + i) % NUM_PAIRS] for i in range(BATCH)]
        optimizer.param_groups[0]["lr"] = LR * (1 - step / STEPS)
        optimizer.zero_grad()
        logit_BW = _logits(model, builder, [prompt for prompt, _ in chosen])
        F.cross_entropy(logit_BW, torch.tensor([letter for _, letter in chosen])).backward()
        optimizer.step()


def _logits(model: Glm5, builder: PolicyBuilder, prompts: Sequence[str]) -> Tensor:
    """Of the first token of a reply to each, [B, W]."""
    ids = [builder.chat.prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    lengths = [len(one) for one in ids]
    ids_T = torch.tensor([token for one in ids for token in one])
    hidden_TD = model(ids_T, PackedView(lengths, model.device, stage="sparse"))
    return model.lm_head(hidden_TD[torch.tensor(lengths).cumsum(0) - 1])


def _known_pairs(seed: int) -> list[tuple[str, str, str]]:
    """Tasks with a better and a worse answer."""
    environment, random, found = Comfort(), Random(f"held out {seed}"), list[tuple[str, str, str]]()
    while len(found) < HELD_OUT:
        task = environment.task(PAIRS_FROM + NUM_PAIRS + random.randrange(10**6), 0)
        pair = [environment.random_reply(task, random, "").content for _ in range(2)]
        rewards = [scored(task, said).metrics["true"] for said in pair]
        if rewards[0] != rewards[1]:
            better, worse = pair if rewards[0] > rewards[1] else pair[::-1]
            found.append((str(task.messages[0]["content"]), better, worse))
    return found


def _prompt(task: str, a: str, b: str) -> str:
    return f"{task} A {a} B {b}"
