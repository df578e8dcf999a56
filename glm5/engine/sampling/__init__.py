"""Logits to tokens: batched, on the device, by state that a sequence leaves in its slot when it takes it.

params     what callers write, each number declared once: `SamplingParams`        words    bad words as token sequences
slots      per-slot tables: who sits where, what was written so far               edits    rules, masks and penalties
draw       temperature, min-p, top-k, top-p, then the race                        noise    what the race is run with
sampler    logits in, tokens and log-probabilities out: `Sampler`                 logprobs of tokens, and the likeliest
drafts     which drafted tokens are accepted                                      grammar  xgrammar's masks
schema     JSON schemas that a grammar cannot honour                              compiling off the step's path

A token is a function of its row of logits, its sequence's parameters and earlier tokens, seed and position: of nothing
else in the batch, bit for bit. The order of operations is vLLM's: allowed tokens and grammar, bad words, min tokens,
logit bias, penalties (repetition, frequency, presence), temperature, min-p, top-k, top-p. Everything is float32.

Shape letters are those of `glm5.model`. T here are rows of logits: one a sequence, or 1 + its drafts. The last of the Y
request slots is for padding rows. U are the entries of a slot's list (biases, bad words), or the likeliest tokens.
"""

from typing import TYPE_CHECKING

from glm5.common.lazy import exports

if TYPE_CHECKING:
    from glm5.engine.sampling.drafts import Accepted, accept
    from glm5.engine.sampling.edits import Rows
    from glm5.engine.sampling.params import SamplingParams, StructuredOutputsParams
    from glm5.engine.sampling.sampler import Sampled, Sampler
    from glm5.engine.sampling.slots import Placement

__all__ = [
    "Accepted",
    "Placement",
    "Rows",
    "Sampled",
    "Sampler",
    "SamplingParams",
    "StructuredOutputsParams",
    "accept",
]
# Clients need the parameters alone, and no torch.
_PARTS = {
    "drafts": ("Accepted", "accept"),
    "edits": ("Rows",),
    "params": ("SamplingParams", "StructuredOutputsParams"),
    "sampler": ("Sampled", "Sampler"),
    "slots": ("Placement",),
}
__getattr__ = exports(__name__, {name: f"{__name__}.{part}" for part, names in _PARTS.items() for name in names})
