"""Log-probabilities of given tokens, from hidden states."""

from torch import Tensor

from glm5.kernels.dispatch import Impl, Table

TABLE = Table(__name__, chunked=Impl("logits of `chunk` positions exist at a time"), reference=Impl("the definition"))


def token_logprobs(
    hidden_TD: Tensor,
    weight_WD: Tensor,
    target_T: Tensor,
    *,
    chunk: int = 4096,
    impl: str = "auto",
) -> Tensor:
    """log softmax(hidden W^T)[t, target[t]], [T] in float32 (float64 for float64); differentiable in hidden and weight.

    Minus its mean is the cross-entropy. `chunked` holds the logits of `chunk` positions at a time: at 200k tokens of
    154,880 possible ones, 2.4 GiB in place of 118.
    """
    return TABLE.module(impl, hidden_TD).token_logprobs(hidden_TD, weight_WD, target_T, chunk)
