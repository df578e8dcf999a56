"""Tasks with sliding-window attention, which the engine does not have: the report's ablation on a full model.

Answers are teacher-forced: the most likely token at each position of the correct answer. Up to the first error that is
the greedy answer; after it the score is more lenient, since the correct tokens are the context.
"""

from collections.abc import Sequence

import torch

from glm5.chat.tokenizer import Tokenizer
from glm5.config.step import WindowConfig
from glm5.eval.ruler import Answerer, Question, make
from glm5.model.glm5 import Glm5
from glm5.train.batch import Batch
from glm5.train.sliding_window import search_pattern
from glm5.train.step import Phase

TOKENS_AT_ONCE = 1 << 16
SAMPLES_PER_TASK = 2
"""Samples of each task for the search of a pattern."""


def by_windows(model: Glm5, tokenizer: Tokenizer, window: WindowConfig) -> Answerer:
    """Teacher-forced answers of the model with these windows."""

    def answer(items: Sequence[Question]) -> list[str]:
        predicted = [ids for batch in _batches(items) for ids, _ in _predict(model, batch, window)]
        return [tokenizer.decode(ids, skip_special=True) for ids in predicted]

    return answer


def find_pattern(model: Glm5, tokenizer: Tokenizer, size: int, tasks: Sequence[str], length: int) -> str:
    """SWA Pattern: windows in half of the layers, chosen for the least loss on the answers to these tasks.

    The samples are other ones than those of `evaluate`.
    """
    items = [each for task in tasks for each in make(tokenizer, task, length, range(-SAMPLES_PER_TASK, 0))]

    def loss(pattern: str) -> float:
        window = WindowConfig(size=size, pattern=pattern)
        losses = [loss for batch in _batches(items) for _, loss in _predict(model, batch, window)]
        return sum(losses) / len(losses)

    num_layers = model.cfg.num_hidden_layers
    return search_pattern(loss, num_layers, num_layers // 2)[0]


@torch.no_grad()
def _predict(model: Glm5, items: Sequence[Question], window: WindowConfig) -> list[tuple[list[int], float]]:
    """For each answer the most likely token at each position, and the mean cross-entropy of the correct tokens."""
    sizes = [(len(each.prompt_ids), len(each.answer_ids)) for each in items]
    ids_T = torch.tensor([token_id for each in items for token_id in (*each.prompt_ids, *each.answer_ids)])
    weight_T = torch.cat([torch.cat([torch.zeros(prompt), torch.ones(answer)]) for prompt, answer in sizes])
    batch = Batch(ids_T, weight_T, [prompt + answer for prompt, answer in sizes]).to(model.device)
    position_G, target_G, _ = batch.targets(1)
    hidden_GD = model(batch.ids_T, Phase(window=window).view(batch))[position_G]
    logprob_GW = model.head(hidden_GD).float().log_softmax(-1)
    loss_G = -logprob_GW.gather(1, target_G[:, None]).squeeze(1)
    answers = [answer for _, answer in sizes]
    predicted = zip(logprob_GW.argmax(-1).split(answers), loss_G.split(answers), strict=True)
    return [(ids.tolist(), loss.mean().item()) for ids, loss in predicted]


def _batches(items: Sequence[Question]) -> list[list[Question]]:
    """Batches of at most TOKENS_AT_ONCE tokens; a longer sample is a batch of its own."""
    groups: list[list[Question]] = []
    num_free = 0
    for each in items:
        length = len(each.prompt_ids) + len(each.answer_ids)
        if not groups or length > num_free:
            groups.append([])
            num_free = TOKENS_AT_ONCE
        groups[-1].append(each)
        num_free -= length
    return groups
