"""How far training passes are from the log-probabilities that an engine reported, and how far mistakes are:

    python -m tests.support.mismatch [CHECKPOINT]

Of 8,192 sampled tokens: mean and largest difference of log-probabilities, the estimate k3 of the KL divergence, the
share that IcePop masks. Passes: the definition's, the same with the engine's experts replayed, the exact one. Engines:
deterministic, not, and with weights in FP8. Mistakes (controls), of the definition's pass with replay: the temperature
left out, each token taken for the next, weights one optimizer step old.
"""

import copy
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import glm5
from glm5.checkpoint.save import save
from glm5.engine.llm import LLM
from glm5.engine.sampling.params import SamplingParams
from glm5.model.glm5 import Glm5
from glm5.rl.training.exact import ExactPass
from glm5.rl.training.expert_replay import replayed_experts
from tests.support.exact import REPORTED, SAMPLED, Drawn, default_logprobs, prompts_of

MINI = Path(__file__).parents[2] / "models" / "mini"
NUM_SEQS, NUM_TOKENS = 64, 128  # 8,192 sampled tokens
ICEPOP = 2.0  # a ratio beyond this, or below its inverse, is masked
TEMPERATURE = 0.5
LR = 1e-3
"""Of the optimizer step by which weights are old: the first one of Adam, so this far in each weight."""


@dataclass(frozen=True)
class Sampled:
    """8,192 sampled tokens, the experts of all computed tokens, and the engine's arithmetic."""

    drawn: Drawn
    expert_TLA: Tensor
    arithmetic: str | None


@dataclass(frozen=True)
class Mismatch:
    """Of a training pass and an engine."""

    mean: float
    largest: float
    k3: float
    masked: float
    differ: float

    @classmethod
    def of(cls, logprob_G: Tensor, reported_G: Tensor) -> "Mismatch":
        log_ratio_G = logprob_G.detach() - reported_G
        ratio_G = log_ratio_G.exp()
        masked = ((ratio_G > ICEPOP) | (ratio_G < 1 / ICEPOP)).float().mean()
        k3 = (ratio_G - 1 - log_ratio_G).mean()
        apart_G = log_ratio_G.abs()
        return cls(*map(float, (apart_G.mean(), apart_G.max(), k3, masked, (log_ratio_G != 0).float().mean())))

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.2e}, largest {self.largest:.2e}, k3 {self.k3:.2e}, masked {self.masked:.3%}, "
            f"differ {self.differ:.1%}"
        )


def sample(
    source: Glm5 | Path, vocab_size: int, *, ways: Sequence[dict[str, Any]] = SAMPLED, seed: int = 0, **settings: Any
) -> Sampled:
    """`settings`: of the engine."""
    rng = random.Random(seed)
    prompts = prompts_of(rng, vocab_size, [rng.randint(1, 150) for _ in range(NUM_SEQS)])
    options = {"max_tokens": NUM_TOKENS, **REPORTED}
    params = [
        SamplingParams(**options, seed=rng.getrandbits(31), **ways[number % len(ways)]) for number in range(NUM_SEQS)
    ]
    drawn, experts = Drawn(sequences=[list(prompt) for prompt in prompts]), []
    settings |= {"enable_return_routed_experts": True, "max_model_len": 320, "max_num_seqs": NUM_SEQS}
    with LLM(source, **settings) as llm:
        arithmetic = llm.client.info.arithmetic
        for number, output in enumerate(llm.generate(prompts, params, use_tqdm=False, routed_experts=True)):
            answer = output.outputs[0]
            logprobs = answer.tempered_logprobs or []
            drawn.add(number, answer.token_ids, logprobs, answer.weight_versions, params[number])
            experts.append(answer.routed_experts)
    return Sampled(drawn, torch.from_numpy(np.concatenate(experts)).to(drawn_device(source)), arithmetic)


def drawn_device(source: Glm5 | Path) -> torch.device:
    if isinstance(source, Glm5):
        return source.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def passes(model: Glm5, sampled: Sampled) -> dict[str, Mismatch]:
    """By the pass."""
    drawn = sampled.drawn
    with torch.no_grad():
        found = {
            "definition": default_logprobs(model, drawn),
            "with replay": replayed(model, drawn, sampled.expert_TLA),
            "exact": drawn.scored(ExactPass(model, threads=torch.get_num_threads())),
        }
    return {name: Mismatch.of(logprob_G, drawn.reported) for name, logprob_G in found.items()}


def controls(model: Glm5, sampled: Sampled) -> dict[str, Mismatch]:
    """By the mistake."""
    drawn, experts = sampled.drawn, sampled.expert_TLA
    hot = replace(drawn, params=[SamplingParams(temperature=1.0)] * len(drawn.params))
    found = {
        "no temperature": replayed(model, hot, experts),
        "next token": replayed(model, drawn, experts).roll(-1),
        "old weights": replayed(one_step_on(model, drawn), drawn, experts),
    }
    return {name: Mismatch.of(logprob_G, drawn.reported) for name, logprob_G in found.items()}


@torch.no_grad()
def replayed(model: Glm5, drawn: Drawn, expert_TLA: Tensor) -> Tensor:
    """The definition's log-probabilities with the engine's experts."""
    with replayed_experts(model, expert_TLA):
        return default_logprobs(model, drawn)


def one_step_on(model: Glm5, drawn: Drawn) -> Glm5:
    """The model after a policy gradient step with random advantages."""
    stepped = copy.deepcopy(model).requires_grad_()
    gen = torch.Generator().manual_seed(0)
    (default_logprobs(stepped, drawn) * torch.randn(len(drawn.place), generator=gen)).mean().backward()
    with torch.no_grad():
        for parameter in stepped.parameters():
            if parameter.grad is not None:
                parameter.copy_(parameter.float() + LR * parameter.grad.sign().float())
                parameter.grad = None
    return stepped


def main(checkpoint: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = glm5.load(checkpoint, device=device)
    cfg, ways = model.cfg, [{"temperature": TEMPERATURE}]
    with tempfile.TemporaryDirectory() as folder:
        save(model, Path(folder) / "fp8", dtype="fp8")
        engines: dict[str, tuple[Glm5 | Path, dict[str, Any]]] = {
            "deterministic": (model, {"deterministic": True}),
            "not deterministic": (model, {"deterministic": False}),
            "FP8": (Path(folder) / "fp8", {"deterministic": False, "tokenizer": checkpoint, "device": device}),
        }
        for name, (source, settings) in engines.items():
            sampled = sample(source, cfg.vocab_size, ways=ways, **settings)
            for what, found in (passes(model, sampled) | controls(model, sampled)).items():
                print(f"{name + ':':19}{what:16}{found}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else MINI)
