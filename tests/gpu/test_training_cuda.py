"""What training runs on a GPU, at GLM-5's widths: results and gradients against float64, and the same bits where torch
is asked for them."""

import pytest
import torch
from torch import Tensor

from glm5.config.model import ModelConfig
from glm5.config.step import LossConfig, OptimizerConfig
from glm5.kernels.grouped_experts import grouped_experts
from glm5.kernels.index_kl import index_kl
from glm5.kernels.rms_norm import rms_norm
from glm5.kernels.rope import rope, rope_table
from glm5.kernels.sequence_attention import sequence_attention
from glm5.kernels.sparse_mla import sparse_mla
from glm5.model import Glm5
from glm5.testing.numerics import rel_rms
from glm5.train import activation_memory
from glm5.train.activation_memory import set_activation_memory
from glm5.train.batch import Batch
from glm5.train.master_weights import MasterWeights
from glm5.train.optim.build import Optimizers
from glm5.train.step import Phase, Step
from tests.support.parity import BASE, randomize

pytestmark = pytest.mark.gpu

# Inputs are rounded to bfloat16 before both runs; results, probabilities and gradients are rounded to it too.
BUDGET = 1e-2
LENGTHS = {"one length": [300, 300], "ragged": [1, 70, 523, 5]}


@pytest.fixture
def gen(seed) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def compared(run, inputs: list[Tensor], grad_shape, gen: torch.Generator, reference=None) -> list[float]:
    """Distances of the result and of each gradient of `run` in bfloat16 from float64's."""
    grad = torch.randn(grad_shape, device="cuda", generator=gen).bfloat16()
    found = []
    for which, dtype in ((run, torch.bfloat16), (reference or run, torch.float64)):
        leaves = [one.bfloat16().to(dtype).requires_grad_() for one in inputs]
        out = which(*leaves)
        out.backward(grad.to(dtype))
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    return [rel_rms(got, want) for got, want in zip(*found, strict=True)]


def rows(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=gen)


@pytest.mark.parametrize("widths", [(256, 256), (128, 96)], ids=str)
@pytest.mark.parametrize("name", LENGTHS)
def test_attention_of_sequences(name, widths, gen):
    lengths, (width, value_width) = LENGTHS[name], widths
    num = sum(lengths)
    inputs = [rows(gen, num, 3, w) for w in (width, width, value_width)]
    for impl_apart in compared(
        lambda q, k, v: sequence_attention(q, k, v, lengths, scale=width**-0.5, impl="flash")[0],
        inputs,
        (num, 3, value_width),
        gen,
        lambda q, k, v: sequence_attention(q, k, v, lengths, scale=width**-0.5, impl="reference")[0],
    ):
        assert impl_apart < BUDGET
    q, k, v = (one.bfloat16() for one in inputs)
    lse = sequence_attention(q, k, v, lengths, scale=width**-0.5, impl="flash")[1]
    want = sequence_attention(q.double(), k.double(), v.double(), lengths, scale=width**-0.5, impl="reference")[1]
    assert rel_rms(lse, want) < 1e-5


def packed(lengths: list[int], top_k: int, gen: torch.Generator) -> tuple[tuple[Tensor, ...], Tensor]:
    """Where packed sequences lie, and a selection of each token's keys."""
    end = torch.cat([torch.arange(1, n + 1) for n in lengths]).int().cuda()
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int().cuda()
    order = rows(gen, len(end), max(lengths)).masked_fill(
        torch.arange(max(lengths), device="cuda") >= end[:, None], 9.0
    )
    keys = order.argsort(dim=1)[:, :top_k].int()
    keys = keys.masked_fill(keys >= end[:, None], -1)
    return (torch.arange(len(lengths), dtype=torch.int32, device="cuda")[:, None], row, end), keys


@pytest.mark.parametrize("in_order", [False, True], ids=["atomic", "in order"])
@pytest.mark.parametrize("heads", [64, 6])
def test_sparse_attention(heads, in_order, gen):
    lengths, C, R = LENGTHS["ragged"], 512, 64
    where, keys = packed(lengths, 200, gen)
    q, pool = rows(gen, sum(lengths), heads, C + R), rows(gen, len(lengths), max(lengths), C + R)
    scale = 0.05

    def run(impl: str):
        return lambda q, pool: sparse_mla(q, pool, keys, *where, scale=scale, value_dim=C, impl=impl)[0]

    torch.use_deterministic_algorithms(mode=in_order)
    try:
        apart = compared(run("trained"), [q, pool], (sum(lengths), heads, C), gen, run("gather"))
        if in_order:
            leaves = [one.bfloat16().requires_grad_() for one in (q, pool)]
            grads = []
            for _ in range(5):
                run("trained")(*leaves).sum().backward()
                grads.append([leaf.grad.clone() for leaf in leaves])
                for leaf in leaves:
                    leaf.grad = None
            assert all(torch.equal(a, b) for grad in grads for a, b in zip(grad, grads[0], strict=True))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    print(apart)
    assert max(apart) < BUDGET


@pytest.mark.parametrize("selected", [False, True], ids=["all", "selected"])
@pytest.mark.parametrize("sizes", [(32, 128, 64, 576), (4, 32, 6, 96)], ids=str)
def test_loss_of_the_indexer(sizes, selected, gen):
    (J, I, H, L), lengths = sizes, LENGTHS["ragged"]
    where, keys = packed(lengths, 100, gen)
    keys = keys if selected else None
    num, pool = sum(lengths), (len(lengths), max(lengths))
    attention = [(rows(gen, num, H, L).bfloat16(), rows(gen, *pool, L).bfloat16()) for _ in range(2)]
    leaves = [rows(gen, num, J, I).bfloat16(), rows(gen, *pool, I).bfloat16(), rows(gen, num, J)]
    found = []
    for impl, dtype in (("triton", torch.bfloat16), ("reference", torch.float64)):
        served = []
        for q, latent in attention:
            lse = sparse_mla(q.double(), latent.double(), keys, *where, scale=0.05, value_dim=L - 8, impl="gather")[1]
            served.append((q.to(dtype), latent.to(dtype), lse.to(torch.promote_types(dtype, torch.float32))))
        wide = torch.promote_types(dtype, torch.float32)
        made = [one.to(to, copy=True).requires_grad_() for one, to in zip(leaves, (dtype, dtype, wide), strict=True)]
        loss = index_kl(*made, served, keys, *where, index_scale=I**-0.5, scale=0.05, impl=impl)
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in made)])
    apart = [rel_rms(got, want) for got, want in zip(*found, strict=True)]
    print(apart)
    assert max(apart) < BUDGET


def test_experts(gen):
    T, A, E, D, F = 700, 4, 12, 256, 128
    expert = rows(gen, T, E - 1).argsort(dim=1)[:, :A].int()  # the last one gets nothing
    inputs = [rows(gen, T, D), rows(gen, E, 2 * F, D) * D**-0.5, rows(gen, E, D, F) * F**-0.5, rows(gen, T, A).abs()]
    apart = compared(
        lambda *leaves: grouped_experts(*leaves, expert, impl="trained"),
        inputs,
        (T, D),
        gen,
        lambda *leaves: grouped_experts(*leaves, expert, impl="reference"),
    )
    print(apart)
    assert max(apart) < BUDGET


def test_norm_and_rope(gen):
    inputs = [rows(gen, 900, 6144), rows(gen, 6144)]
    apart = compared(
        lambda x, w: rms_norm(x, w, 1e-5, impl="trained"),
        inputs,
        (900, 6144),
        gen,
        lambda x, w: rms_norm(x, w, 1e-5, impl="reference"),
    )
    assert max(apart) < BUDGET
    tables = {
        dtype: rope_table(torch.arange(90, device="cuda"), 64, 1e4, dtype) for dtype in (torch.bfloat16, torch.float64)
    }
    apart = compared(
        lambda x: rope(x[..., 192:], *(one.to(x.dtype) for one in tables[torch.bfloat16]), impl="triton"),
        [rows(gen, 90, 8, 256)],
        (90, 8, 64),
        gen,
        lambda x: rope(x[..., 192:], *(one.to(x.dtype) for one in tables[torch.bfloat16]), impl="reference"),
    )
    assert max(apart) < BUDGET


@pytest.mark.parametrize("phase", ["dense", "warmup", "sparse"])
def test_steps_of_a_model(phase, gen):
    """Loss and its fall as on the CPU in float32; twice the same bits where they are asked for."""
    cfg = ModelConfig.from_dict(BASE | {"num_nextn_predict_layers": 1, "index_topk": 8, "n_routed_experts": 8})
    requested = Phase(phase, learn_index=phase != "dense")
    ids = torch.randint(2, cfg.vocab_size, (90,), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, torch.ones(90), [50, 33, 7])

    def losses(device: str, *, in_order: bool = False) -> list[float]:
        model = Glm5(cfg)
        randomize(model, seed=3)
        model = model.to(device)
        masters = MasterWeights(model, torch.bfloat16) if device == "cuda" else None
        named = dict(model.named_parameters()) if masters is None else masters.trained()
        step = Step(model, Optimizers(named, cfg, OptimizerConfig()), LossConfig(mtp_depth=2), requested, masters)
        torch.use_deterministic_algorithms(mode=in_order)
        try:
            return [step.run([batch.to(device)], 3e-3)["index" if phase == "warmup" else "loss"] for _ in range(4)]
        finally:
            torch.use_deterministic_algorithms(mode=False)

    on_gpu, on_cpu = losses("cuda"), losses("cpu")
    print(on_gpu, on_cpu)
    assert on_gpu == pytest.approx(on_cpu, rel=0.1)
    assert losses("cuda", in_order=True) == losses("cuda", in_order=True)


@pytest.mark.parametrize(("recompute", "offload"), [("mlp", False), ("layer", False), (None, True), ("layer", True)])
def test_less_is_kept(recompute, offload, monkeypatch):
    """The same gradients, and less memory between the passes."""
    monkeypatch.setattr(activation_memory, "_MIN_OFFLOAD", 1 << 10)
    cfg = ModelConfig.from_dict(BASE | {"num_nextn_predict_layers": 0, "index_topk": 8})
    batch = Batch(torch.arange(4096) % 60 + 2, torch.ones(4096), [2048, 2048]).to("cuda")

    def ran(*requested) -> tuple[list[Tensor], int]:
        model = Glm5(cfg)
        randomize(model, seed=3)
        model = model.cuda().bfloat16()
        set_activation_memory(model, requested[0], offload=requested[1])
        for _ in range(2):
            model.zero_grad()
            before = torch.cuda.memory_allocated()
            loss = model(batch.ids_T, Phase("dense").view(batch)).float().square().mean()
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated() - before
            loss.backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None], held

    torch.use_deterministic_algorithms(mode=True)
    try:
        (want, plain), (got, less) = ran(None, False), ran(recompute, offload)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert less < plain
