"""The kernels around a decoding step, under Triton's interpreter where there is no GPU: exactly the definitions."""

import pytest
import torch

from glm5.engine.sampling.drafts import accept_on_device
from glm5.kernels.best_token import best_token
from glm5.kernels.commit_tokens import CommittedTokens, commit_tokens
from glm5.kernels.step_rows import step_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
S, N, Z, DUMP = 5, 40, 8, 99


@pytest.fixture
def tables(gen):
    len_Y = torch.randint(2, 20, (S,), generator=gen)
    token_YS = torch.randint(0, 1000, (S, N), generator=gen)
    table_YP = torch.randint(0, DUMP, (S, 4), generator=gen).int()
    return [table.to(DEVICE) for table in (len_Y, token_YS, table_YP)]


@pytest.mark.parametrize("count", [1, 7, 200])
def test_where_rows_are(gen, tables, count):
    slot = torch.randint(0, S, (count,), generator=gen)
    start = torch.randint(-1, 12, (count,), generator=gen)
    offset, live = (torch.randint(0, high, (count,), generator=gen) for high in (6, 3))
    rows = [each.to(DEVICE) for each in (slot, start, offset, live)]
    got, want = (step_rows(*rows, *tables, page_size=Z, dump_page=DUMP, impl=impl) for impl in ("triton", "reference"))
    for own, right in zip(got, want, strict=True):
        assert own.dtype == right.dtype
        assert torch.equal(own, right)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_what_a_step_comes_to(gen, tables, depth):
    """Drafts that stand, that do not, that a slot does not have; a slot without rows, and padding's rows."""
    rows = [(slot, offset) for slot in (0, 2, 3) for offset in range(1 + (depth if slot != 3 else 0))] + [
        (S - 1, 0)
    ] * 3
    slot_R, offset_R = torch.tensor(rows).T.contiguous().to(DEVICE)
    drafts_Y = torch.randint(0, 3, (S, depth), generator=gen).to(DEVICE)
    token_R = torch.randint(0, 3, (len(rows),), generator=gen).to(DEVICE)
    token_R[: depth + 1][:-1] = drafts_Y[0]  # all of the first slot's stand
    sampling_slot_B = torch.tensor([2, 0, 3, S - 1], device=DEVICE)
    position_R = tables[0][slot_R] + offset_R
    reported = []
    for impl in ("triton", "reference"):
        len_Y, token_YS = tables[0].clone(), tables[1].clone()
        out = CommittedTokens(*(torch.full(size, -9, device=DEVICE) for size in ((4, depth + 1), (4,), (4, depth))))
        commit_tokens(token_R, slot_R, offset_R, position_R, drafts_Y, sampling_slot_B, token_YS, len_Y, out, impl=impl)
        reported.append([*(part[:3] for part in out), len_Y, token_YS[:-1], out.count_B])
    for own, right in zip(*reported, strict=True):
        assert torch.equal(own, right)
    accepted = accept_on_device(token_R, slot_R, offset_R, drafts_Y)
    assert torch.equal(reported[0][1], accepted.count_Y[sampling_slot_B][:3])
    assert reported[0][1][1] == depth + 1
    assert reported[0][-1][3] == 0


@pytest.mark.parametrize("width", [5, 4096, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_likeliest_token(gen, width, dtype):
    logits = torch.randn(6, width, generator=gen).to(dtype)
    logits[0, [1, 3]] = 50.0  # equals
    logits[1] = -torch.inf
    logits[2, -1] = torch.nan
    logits[3, -1] = 60.0
    got, want = (best_token(logits.to(DEVICE), impl=impl) for impl in ("triton", "reference"))
    assert torch.equal(got[1], want[1])
    assert got[1].tolist() == [False, True, True, False, False, False]
    assert torch.equal(got[0][~got[1]], want[0][~want[1]])
