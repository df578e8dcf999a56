"""On a GPU: the same tokens as on a CPU, and a step that a CUDA graph can hold."""

import pytest
import torch

from glm5.engine.sampling import Placement, Rows, Sampler, SamplingParams, accept
from tests.unit.engine.sampling.oracle import rows_of
from tests.unit.engine.sampling.test_invariance import DEPTH, NUM_SLOTS, all_kinds

pytestmark = pytest.mark.gpu
VOCAB = 4099
# Logarithms may differ in their last bit: two tokens whose scores are that close may then change places.
SHARE_OF_EQUAL_TOKENS = 0.999


def on_gpu(rows: Rows) -> Rows:
    return Rows(rows.slots, *(tensor.cuda() for tensor in (rows.slot_T, rows.position_T, rows.offset_T)))


def test_tokens_and_logprobs_are_those_of_a_cpu(seed):
    gen = torch.Generator().manual_seed(seed)
    slots = [slot for slot in range(NUM_SLOTS) for _ in range(DEPTH + 1)]
    offsets = list(range(DEPTH + 1)) * NUM_SLOTS
    here, there = (Sampler(NUM_SLOTS, VOCAB, max_drafts=DEPTH, device=device) for device in ("cpu", "cuda"))
    for sampler in (here, there):
        sampler.place(all_kinds(seed, VOCAB))
    num_equal = num_steps = 0
    for step in range(50):
        rows = rows_of(slots, [20 + step * 4 + offset for offset in offsets], offsets)
        logits = torch.randn(len(slots), VOCAB, generator=gen) * 3
        drafts = torch.randint(0, VOCAB, (NUM_SLOTS + 1, DEPTH), generator=gen)
        ours, theirs = here.sample(logits, rows, drafts), there.sample(logits.cuda(), on_gpu(rows), drafts.cuda())
        num_equal += (ours.token_T == theirs.token_T.cpu()).sum().item()
        num_steps += len(slots)
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        same = ours.token_T == theirs.token_T.cpu()
        torch.testing.assert_close(
            ours.logprobs.tempered_T[same], theirs.logprobs.tempered_T.cpu()[same], rtol=0, atol=1e-4
        )
        for sampler, token_T, device in ((here, ours.token_T, "cpu"), (there, ours.token_T.cuda(), "cuda")):
            accepted = accept(token_T, rows.slot_T.to(device), rows.offset_T.to(device), drafts.to(device))
            sampler.record(accepted, rows.slots)
    print(f"{num_equal} of {num_steps} tokens equal")
    assert num_equal >= SHARE_OF_EQUAL_TOKENS * num_steps
    assert torch.equal(here.tables.tail_YU, there.tables.tail_YU.cpu())
    assert torch.equal(here.tables.counts_YW, there.tables.counts_YW.cpu())


def test_a_step_in_a_graph(seed):
    """Captured once with everything but the likeliest tokens; replayed for other logits, positions and sequences."""
    placements = all_kinds(seed, VOCAB)
    placements = [
        Placement(p.slot, p.params.but(logprobs=0), p.seed, p.prompt_ids, p.output_ids, p.stop_ids, p.bad_words)
        for p in placements
    ]
    sampler, eager = (Sampler(NUM_SLOTS, VOCAB, max_drafts=1, device="cuda") for _ in range(2))
    sampler.place(placements)
    eager.place(placements)
    rows = on_gpu(
        rows_of([slot for slot in range(NUM_SLOTS) for _ in range(2)], [20, 21] * NUM_SLOTS, [0, 1] * NUM_SLOTS)
    )
    gen = torch.Generator("cuda").manual_seed(seed)
    logits = torch.randn(2 * NUM_SLOTS, VOCAB, generator=gen, device="cuda")
    drafts = torch.randint(0, VOCAB, (NUM_SLOTS + 1, 1), generator=gen, device="cuda")

    def step(sampler: Sampler) -> tuple[torch.Tensor, torch.Tensor]:
        sampled = sampler.sample(logits, rows, drafts)
        accepted = accept(sampled.token_T, rows.slot_T, rows.offset_T, drafts)
        sampler.record(accepted, rows.slots)
        return sampled.token_T, accepted.count_Y

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(eager)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        token_T, count_Y = step(sampler)
    eager.place(placements)  # both as before the first step
    sampler.place(placements)
    for turn in range(5):
        logits.copy_(torch.randn(logits.shape, generator=gen, device="cuda"))
        drafts.copy_(torch.randint(0, VOCAB, drafts.shape, generator=gen, device="cuda"))
        graph.replay()
        wanted_T, wanted_S = step(eager)
        assert torch.equal(token_T, wanted_T)
        assert torch.equal(count_Y, wanted_S)
        rows.position_T.add_(1)
        if turn == 2:
            for one in (sampler, eager):
                one.place([Placement(3, SamplingParams(temperature=0.5, logprobs=0), 9, [4], [5])])
