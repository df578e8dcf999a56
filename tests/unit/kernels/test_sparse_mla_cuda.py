"""sparse_mla in CUDA C++: what can be said without a GPU. tests/gpu has the kernel."""

import pytest
import torch

from glm5.kernels.sparse_mla import sparse_mla
from glm5.kernels.sparse_mla.cuda import num_shares


def test_shares_fill_the_gpu_and_no_second_turn_is_short():
    assert [num_shares(count, 2048, 132) for count in (1, 8, 32, 64, 128, 132)] == [32, 16, 4, 2, 1, 1]
    for count in range(1, 512):
        shares = num_shares(count, 2048, 132)
        turns = -(-count * shares // 132)
        assert turns * (-(-32 // shares) + 1.5) <= -(-count // 132) * 33.5, f"{count=}"
    assert num_shares(1, 1, 132) == num_shares(3, 64, 132) == 1


def test_what_is_refused():
    where = torch.zeros(1, 2).int(), torch.zeros(1).int(), torch.ones(1).int()
    q, pool = torch.zeros(1, 8, 576, dtype=torch.bfloat16), torch.zeros(2, 64, 576, dtype=torch.bfloat16)
    opts = {"scale": 1.0, "value_dim": 512, "impl": "cuda"}
    with pytest.raises(
        ValueError, match=r"sparse_mla\[cuda\] needs queries and latents in bfloat16; use impl='triton'"
    ):
        sparse_mla(q.float(), pool.float(), None, *where, **opts)
    with pytest.raises(ValueError, match=r"needs 8 or 16 heads, .* got 4, 512, 576"):
        sparse_mla(q[:, :4], pool, None, *where, **opts)
    with pytest.raises(ValueError, match="needs Hopper, got cpu"):
        sparse_mla(q, pool, None, *where, **opts)
