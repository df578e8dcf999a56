"""Answers of an engine beside what a training pass makes of the same tokens."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm5.engine.llm import LLM
from glm5.engine.sampling.draw import Vocabulary
from glm5.engine.sampling.draw import kept as cut
from glm5.engine.sampling.params import Feature, SamplingParams
from glm5.kernels.sampled_logprobs import Kept, bits_of, recorded
from glm5.model.glm5 import Glm5
from glm5.model.packed import PackedView
from glm5.rl.training.exact import ExactPass
from tests.support.masks import kept_of

SAMPLED = (
    {"temperature": 0.3},
    {"temperature": 1.0},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.02},
)

REPORTED = {"ignore_eos": True, "logprobs": 0}


@dataclass
class Drawn:
    """Sequences, and of each sampled token where it is, how it was drawn, and what the engine said of it."""

    sequences: list[list[int]] = field(default_factory=list)
    place: list[tuple[int, int]] = field(default_factory=list)  # (sequence, position of the row that drew it)
    params: list[SamplingParams] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def add(
        self,
        number: int,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        versions: Sequence[int],
        params: SamplingParams,
    ) -> None:
        """What an engine drew at the end of the sequence of that number."""
        start = len(self.sequences[number])
        self.sequences[number] += token_ids
        self.place += [(number, start + index - 1) for index in range(len(token_ids))]
        self.params += [params] * len(token_ids)
        self.logprobs += logprobs
        self.versions += versions

    @property
    def lengths(self) -> list[int]:
        """Of what is computed: an answer's last token never is."""
        return [len(ids) - 1 for ids in self.sequences]

    @property
    def ids(self) -> Tensor:
        return torch.tensor([token_id for ids in self.sequences for token_id in ids[:-1]])

    @property
    def rows(self) -> Tensor:
        first = torch.tensor([0, *self.lengths]).cumsum(0)
        return torch.tensor([int(first[number]) + position for number, position in self.place])

    @property
    def targets(self) -> Tensor:
        return torch.tensor([self.sequences[number][position + 1] for number, position in self.place])

    @property
    def temperatures(self) -> Tensor:
        return torch.tensor([params.temperature for params in self.params])

    @property
    def reported(self) -> Tensor:
        return torch.tensor(self.logprobs)

    def scored(self, exact: ExactPass, temperature_G: Tensor | None = None) -> Tensor:
        """The exact pass's log-probabilities, with a graph."""
        device = exact.model.device
        hidden_TD = exact.hidden(self.ids.to(device), self.lengths)
        return self.logprobs_of(exact, hidden_TD[self.rows.to(device)], temperature_G)

    def logprobs_of(self, exact: ExactPass, hidden_GD: Tensor, temperature_G: Tensor | None = None) -> Tensor:
        device = exact.model.device
        temperature_G = self.temperatures if temperature_G is None else temperature_G
        given = exact.model.lm_head.weight, self.targets.to(device), temperature_G.to(device)
        return exact.logprobs(hidden_GD, *given, self.kept(exact, hidden_GD.detach()))[0].cpu()

    def kept(self, exact: ExactPass, hidden_GD: Tensor) -> Kept | None:
        """What top_k, top_p and min_p leave, by the engine's own function."""
        if all(one.top_k < 1 and one.top_p == 1 and one.min_p == 0 for one in self.params):
            return None
        with torch.no_grad():
            logits_GW = exact.engine.head(hidden_GD).float()
        numbers = {
            "temperature": self.temperatures,
            "top_k": torch.tensor([max(0, one.top_k) for one in self.params]),
            "top_p": torch.tensor([one.top_p for one in self.params]),
            "min_p": torch.tensor([one.min_p for one in self.params]).log(),
        }
        vocabulary, device = Vocabulary(0, logits_GW.shape[1]), logits_GW.device
        features = Feature.MIN_P | Feature.HEAD
        z_GW = cut(logits_GW, vocabulary.best(logits_GW), lambda name: numbers[name].to(device), features, vocabulary)
        return kept_of(recorded(bits_of(z_GW > -torch.inf).cpu().numpy()), device)


def answers(
    llm: LLM, rng: random.Random, *, turns: int = 2, max_tokens: int = 8, longest: int = 70, ways=SAMPLED
) -> Drawn:
    """Conversations in all ways of sampling: each next turn's prompt is the turn before and a few more tokens."""
    vocab_size = llm.cfg.vocab_size
    stem = [rng.randrange(vocab_size) for _ in range(longest)]
    lengths = [longest, *(rng.randint(1, longest) for _ in ways[1:])]
    drawn = Drawn(sequences=[[*stem[:length], rng.randrange(vocab_size)] for length in lengths])
    for _ in range(turns):
        params = [SamplingParams(max_tokens=max_tokens, **REPORTED, seed=rng.getrandbits(31), **how) for how in ways]
        outputs = llm.generate(drawn.sequences, params, use_tqdm=False)
        for number, (output, how) in enumerate(zip(outputs, params, strict=True)):
            answer = output.outputs[0]
            drawn.sequences[number] = list(output.prompt_token_ids)
            tokens = answer.token_ids, answer.tempered_logprobs, answer.weight_versions
            drawn.add(number, *tokens, how)
        for sequence in drawn.sequences:
            sequence += [rng.randrange(vocab_size) for _ in range(3)]
    return drawn


def default_logprobs(model: Glm5, drawn: Drawn) -> Tensor:
    """What the definition's training pass makes of tokens that were drawn by temperature alone."""
    from glm5.kernels.sampled_logprobs import sampled_logprobs

    device = model.device
    hidden_TD = model(drawn.ids.to(device), PackedView(drawn.lengths, device))[drawn.rows.to(device)]
    given = model.lm_head.weight, drawn.targets.to(device), drawn.temperatures.to(device)
    return sampled_logprobs(hidden_TD, *given)[0].cpu()


def num_unlike(got: Tensor, want: Tensor) -> int:
    return int((got.detach() != want).sum())


def prompts_of(rng: random.Random, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
