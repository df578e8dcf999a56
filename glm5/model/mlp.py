"""The gated MLP of dense layers and of the shared expert: down(silu(gate(x)) * up(x))."""

from torch import Tensor, nn
from torch.nn import functional as F

from glm5.kernels.invariant import Impl, silu
from glm5.model.linear import Linear


class MLP(nn.Module):
    """[T, D] to [T, D] through `intermediate_size` gated units. `impl`: of silu, torch's or kernels/invariant.py's."""

    impl: Impl = "auto"

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x_TD: Tensor) -> Tensor:
        act = silu if self.impl == "invariant" else F.silu
        return self.down_proj(act(self.gate_proj(x_TD)) * self.up_proj(x_TD))
