"""Tasks seen through sliding windows, which the engine does not have: the report's ablation on a whole model.

The right answer stands behind its prompt, and the likeliest token at each of its places is what counts as said. Up to
the first mistake that is the greedy answer; behind it, it is kinder, since the right tokens go on.
"""

from collections.abc import Sequence

import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.config.step import WindowConfig
from glm5.eval.ruler import Answerer, Asked, make
from glm5.model.glm5 import Glm5
from glm5.train.batch import Batch
from glm5.train.sliding_window import search_pattern
from glm5.train.step import Phase

TOKENS_AT_ONCE = 1 << 16
SEARCHED = 2
"""Samples of each task that a pattern is judged by."""


def by_windows(model: Glm5, tokenizer: Tokenizer, window: WindowConfig) -> Answerer:
    """What the model says of each answer with these windows."""

    def answer(asked: Sequence[Asked]) -> list[str]:
        said = [ids for some in _together(asked) for ids, _ in _seen(model, some, window)]
        return [tokenizer.decode(ids, skip_special=True) for ids in said]

    return answer


def find_pattern(model: Glm5, tokenizer: Tokenizer, size: int, tasks: Sequence[str], length: int) -> str:
    """SWA Pattern: windows in half of the layers, those that cost the answers to these tasks the least likelihood.

    It is judged by other samples than those that `evaluate` takes.
    """
    asked = [each for task in tasks for each in make(tokenizer, task, length, range(-SEARCHED, 0))]

    def loss(pattern: str) -> float:
        window = WindowConfig(size=size, pattern=pattern)
        losses = [loss for some in _together(asked) for _, loss in _seen(model, some, window)]
        return sum(losses) / len(losses)

    num_layers = model.cfg.num_hidden_layers
    return search_pattern(loss, num_layers, num_layers // 2)[0]


@torch.no_grad()
def _seen(model: Glm5, asked: Sequence[Asked], window: WindowConfig) -> list[tuple[list[int], float]]:
    """Of each answer, the likeliest tokens at its places, and the mean cross-entropy of the right ones."""
    sizes = [(len(each.prompt_ids), len(each.answer_ids)) for each in asked]
    ids_T = torch.tensor([token_id for each in asked for token_id in (*each.prompt_ids, *each.answer_ids)])
    weight_T = torch.cat([torch.cat([torch.zeros(prompt), torch.ones(answer)]) for prompt, answer in sizes])
    batch = Batch(ids_T, weight_T, [prompt + answer for prompt, answer in sizes]).to(model.device)
    position_G, target_G, _ = batch.targets(1)
    hidden_GD = model(batch.ids_T, Phase(window=window).view(batch))[position_G]
    logprob_GW = model.head(hidden_GD).float().log_softmax(-1)
    loss_G = -logprob_GW.gather(1, target_G[:, None]).squeeze(1)
    answers = [answer for _, answer in sizes]
    said = zip(logprob_GW.argmax(-1).split(answers), loss_G.split(answers), strict=True)
    return [(ids.tolist(), loss.mean().item()) for ids, loss in said]


def _together(asked: Sequence[Asked]) -> list[list[Asked]]:
    """Some at a time."""
    groups: list[list[Asked]] = []
    room = 0
    for each in asked:
        length = len(each.prompt_ids) + len(each.answer_ids)
        if not groups or length > room:
            groups.append([])
            room = TOKENS_AT_ONCE
        groups[-1].append(each)
        room -= length
    return groups
