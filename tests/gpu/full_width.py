"""Logits of a model of GLM-5's full widths, six layers of it, whole on one GPU and shared by several:

    python3 -m tests.gpu.full_width --ranks 2 --weights fp8

Against float32 arithmetic on the same weights, whose routing and selection are forced; then unforced, where other
choices are counted. The first pass has so many rows that ranks deal them out. Every rank loads its own slices of one
checkpoint. (Few experts: the widths are the point.)
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.dummy import dummy
from glm5.checkpoint.load import load
from glm5.checkpoint.save import save
from glm5.config.presets import preset
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.kernels import triton_support
from glm5.parallel.apply import connect
from glm5.parallel.group import ALONE
from glm5.parallel.rendezvous import Rendezvous, open_group, store_at
from glm5.parallel.table import Shard
from tests.support.choices import MAX_LEN, Choices, exact, logits_of
from tests.support.dispatch import as_on
from tests.support.steps import far

LAYERS, EXPERTS, TOP_K, VOCAB = 6, 16, 128, 19360
SECONDS = 120
# Relative RMS of forced logits. Two correct computations in bfloat16 are 1.1 % apart after six layers
# (docs/performance-steps.md); FP8 weights are multiplied with activations in FP8.
BUDGET = {"bfloat16": {"auto": 2e-2, "fp8": 4e-2}, "fp8": {"auto": 6e-2, "fp8": 6e-2}}
# Ranks round their parts before they are added up.
SHARED = 1.25


def whole_config():
    return preset("glm-5", LAYERS).replace(
        n_routed_experts=EXPERTS,
        index_topk=TOP_K,
        vocab_size=VOCAB,
        num_nextn_predict_layers=0,
        eos_token_id=[1],
        pad_token_id=0,
    )


def prepare(folder, weights):
    """The checkpoint, what float32 arithmetic makes of it, and what the inference form does on one GPU."""
    model = dummy(whole_config(), fp8=weights == "fp8", device="cuda", seed=1)
    save(model, folder / "model")
    with pytest.MonkeyPatch.context() as monkeypatch:
        as_on(monkeypatch)
        monkeypatch.setattr(triton_support, "supports", lambda _: False)
        choices, truth = Choices(), exact(model)
        want = logits_of(truth, truth, "auto", choices, "take_down")
        del truth
    torch.save((want, choices.routing, choices.keys), folder / "want")
    errors = measured(model, ALONE, want, choices)
    torch.save(errors, folder / "errors1")
    say(weights, 1, errors)
    for layout, (forced, _) in errors.items():
        assert max(forced) < BUDGET[weights][layout], f"{weights} {layout} {forced}"


def measured(model, group, want, choices):
    """By layout: (relative RMS of forced logits by pass, (share of other choices, KL unforced))."""
    lowered = FusedModel(model, MAX_LEN, group)
    head = lambda hidden_TD: group.all_gather(model.head(hidden_TD)).transpose(0, 1).flatten(1)  # noqa: E731
    errors = {}
    for layout in ("auto", "fp8"):
        forced = logits_of(lowered.hidden, model, layout, choices, "force", head)
        flips = sum(choices.flips) / len(choices.flips)
        free = logits_of(lowered.hidden, model, layout, choices, None, head)
        pairs = list(zip(free, want, strict=True))
        kl = [
            (right.softmax(-1) * (right.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean() for got, right in pairs
        ]
        found = [far(got, right) for got, right in zip(forced, want, strict=True)]
        errors[layout] = found, (flips, max(kl))
    return errors


def divergence(got, right):
    return float((right.softmax(-1) * (right.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean())


def say(weights, ranks, errors):
    for layout, (forced, (flips, kl)) in errors.items():
        shown = ", ".join(f"{error:.2g}" for error in forced)
        print(f"FIGURES {ranks} ranks, {weights} weights, {layout} cache: {shown}; {flips:.4f} other, KL {kl:.2g}")


def rank_main(rank, size, port, folder, weights):
    device = torch.device("cuda", rank)
    group = open_group(Shard(rank, size), device, store_at(port, size), timeout_s=SECONDS)
    want, routing, keys = torch.load(folder / "want", map_location=device)
    choices = Choices(group.shard)
    choices.routing, choices.keys = routing, keys
    model = load(folder / "model", device=device, shard=group.shard)
    connect(model, group)
    errors = measured(model, group, want, choices)
    if rank == 0:
        say(weights, size, errors)
    alone = torch.load(folder / "errors1")
    for layout, (forced, _) in errors.items():
        bounds = [SHARED * bound for bound in alone[layout][0]]
        assert all(got < bound for got, bound in zip(forced, bounds, strict=True)), f"{layout} {forced} {bounds}"
    torch.cuda.synchronize()
    group.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--weights", choices=list(BUDGET), default="fp8")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.ranks, given.port, given.folder, given.weights)
        return 0
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    try:
        prepare(folder, given.weights)
        torch.cuda.empty_cache()
        rendezvous = Rendezvous()
        store = rendezvous.open(given.ranks)
        command = [sys.executable, "-m", __spec__.name, "--ranks", str(given.ranks), "--port", str(rendezvous.port)]
        command += ["--folder", str(folder), "--weights", given.weights]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(given.ranks)]
        codes = [rank.wait() for rank in ranks]
        del store
        return max(map(abs, codes))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
