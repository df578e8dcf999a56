"""Log-probabilities and entropies of the distribution that tokens were sampled from, from hidden states."""

from collections.abc import Callable

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table
from glm5.kernels.sampled_logprobs.kept import Kept, bits_of, kept_ids, recorded
from glm5.kernels.sampled_logprobs.reference import divisor

__all__ = ["Kept", "bits_of", "divisor", "kept_ids", "recorded", "sampled_logprobs"]

TABLE = Table(__name__, chunked=Impl("logits of `chunk` positions exist at a time"), reference=Impl("the definition"))


def sampled_logprobs(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    target_T: Tensor,
    temperature_T: Tensor,
    kept: Kept | None = None,
    *,
    chunk: int = 4096,
    head: Callable[[Tensor], Tensor] | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(log p[t, target[t]], entropy of p[t]), [T] each in float32 (float64 for float64), p = softmax(hidden W^T /
    temperature) over the `kept` vocabulary; both differentiable in hidden and weight.

    A temperature of 0 (greedy) divides by nothing, as in the engine. `kept`: None for all tokens in every row. `head`:
    another way to compute the logits hidden W^T, forward and backward, such as an engine's.
    """
    given = hidden_TD, weight_WD, target_T, temperature_T, kept, chunk, head
    return TABLE.module(impl, hidden_TD).sampled_logprobs(*given)
