"""Layers in native code against the torch layers in float64: logits and drafts of ragged batches, chunk by chunk.

Tolerance: float32 sums of up to 300 terms through four layers err by about 1e-6 of the largest value; 1e-4 leaves room
for other instruction sets. Where two keys or experts score alike within that, a row may read the other one: one row in
a hundred may differ.
"""

import copy
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from glm5.config.engine import EngineConfig
from glm5.config.presets import preset
from glm5.engine.build import build_core
from glm5.engine.cache.kv_cache import KVCache
from glm5.engine.runner.native import parameters_moved, release, use_native
from glm5.kernels import cpu_layer, native_code
from glm5.model.packed import PackedView
from tests.support.cached import CachedRun, view_of
from tests.support.models import random_model

TOLERANCE, FLIPPED = 1e-4, 0.01
ODD = {
    "hidden_size": 36,
    "num_attention_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 21,
    "qk_nope_head_dim": 11,
    "qk_rope_head_dim": 6,
    "v_head_dim": 5,
    "index_n_heads": 5,
    "index_head_dim": 13,
    "index_topk": 9,
    "moe_intermediate_size": 19,
    "intermediate_size": 45,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "vocab_size": 67,
}
CONFIGS = {
    "nano": preset("nano"),
    "tiny": preset("tiny"),
    "odd widths": preset("tiny").replace(**ODD),
    "every key": preset("tiny").replace(index_topk=512),
    "one of each": preset("tiny").replace(
        num_attention_heads=1, index_n_heads=1, index_topk=1, num_experts_per_tok=1, norm_topk_prob=False
    ),
}


def share_unlike(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of rows that are further away than the tolerance."""
    assert found.shape == wanted.shape
    error_T = (found.double() - wanted).abs().amax(dim=-1) / wanted.abs().max()
    return (error_T > TOLERANCE).double().mean().item()


@pytest.mark.compiler
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_torch_layers(name, seed, rng):
    cfg = CONFIGS[name]
    model = random_model(seed, cfg)
    lengths = [200, 90, 33, 1]
    sequences = [[rng.randrange(cfg.vocab_size) for _ in range(length)] for length in lengths]
    wanted = [copy.deepcopy(model).double().logits(ids) for ids in sequences]
    assert use_native(model)
    run = CachedRun(model, sequences)
    while left := {i: n - run.done[i] for i, n in enumerate(lengths) if n > run.done[i]}:
        counts = {i: min(left[i], rng.choice([1, 1, 2, 5, 40])) for i in left}
        run.advance(counts, num_padding=rng.choice([0, 3]))
    for i in range(len(lengths)):
        assert share_unlike(run.logits(i), wanted[i]) <= FLIPPED


@pytest.mark.compiler
def test_another_weight_would_show(seed):
    """The control: a tenth of one norm's weights a little off."""
    model = random_model(seed)
    ids = list(range(1, 60))
    wanted = copy.deepcopy(model).double().logits(ids)
    with torch.no_grad():
        model.model.layers[1].self_attn.kv_a_layernorm.weight[0] *= 1.05
    assert use_native(model)
    assert share_unlike(CachedRun(model, [ids]).finish().logits(), wanted) > 0.5


@pytest.mark.compiler
def test_drafts_are_those_of_the_torch_layers(seed, rng):
    model = random_model(seed)
    ids = torch.tensor([rng.randrange(model.cfg.vocab_size) for _ in range(120)])
    exact = copy.deepcopy(model).double()
    with torch.inference_mode():
        hidden_TD = exact(ids[:-1], PackedView([119]))
        wanted, _ = exact.draft(ids[1:], hidden_TD, PackedView([119]))
        assert use_native(model)
        cache = KVCache(model.cfg, 2, dtype=torch.float32, mtp=True)
        found = []
        for start, end in [(0, 50), (50, 51), (51, 119)]:
            view = view_of(cache, [([1, 0], start, end)])
            found.append(model.draft(ids[start + 1 : end + 1], model(ids[start:end], view), view)[0])
    assert share_unlike(torch.cat(found), wanted) <= FLIPPED


@pytest.mark.compiler
def test_a_draft_reads_the_selection_it_is_given(seed):
    model = random_model(seed)
    ids = torch.arange(1, 81)
    plain = copy.deepcopy(model)
    results = []
    for one in (plain, model):
        if one is model:
            assert use_native(one)
        cache = KVCache(one.cfg, 2, dtype=torch.float32, mtp=True)
        with torch.inference_mode():
            view = view_of(cache, [([0, 1], 0, 79)])
            hidden_TD, selection = one.draft(ids[1:80], one(ids[:79], view), view)
            ahead = view_of(cache, [([0, 1], 79, 80)])
            last = type(selection)(selection.keys_TK[-1:])
            results.append(one.draft(ids[5:6], hidden_TD[-1:], ahead, last)[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)


@pytest.mark.compiler
def test_weights_may_change_in_place_and_may_move(seed):
    """Native code has copies, made anew when it is told so."""
    model, other = random_model(seed), random_model(seed + 1)
    ids = list(range(1, 40))
    assert use_native(model)
    before = CachedRun(model, [ids]).finish().logits()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(other.state_dict()[name])
    parameters_moved(model)
    wanted = other.logits(ids)
    torch.testing.assert_close(CachedRun(model, [ids]).finish().logits(), wanted, rtol=1e-4, atol=1e-4)
    for tensor in model.state_dict(keep_vars=True).values():
        tensor.data = tensor.data.clone()
    parameters_moved(model)
    torch.testing.assert_close(CachedRun(model, [ids]).finish().logits(), wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(before, wanted, atol=1e-2)


@pytest.mark.compiler
def test_copies_can_be_dropped_and_made_again(seed):
    model = random_model(seed)
    ids = list(range(1, 40))
    assert use_native(model)
    before = CachedRun(model, [ids]).finish().logits()
    num_bytes = release(model)
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    own = sum(weight.nbytes for weight in matrices) - model.model.embed_tokens.weight.nbytes
    assert own <= num_bytes < 2 * own  # panels end in zeros
    assert release(model) == 0
    parameters_moved(model)
    assert torch.equal(CachedRun(model, [ids]).finish().logits(), before)


@pytest.mark.compiler
@pytest.mark.parametrize("name", ["tiny", "odd widths"])
def test_a_row_has_the_same_bits_in_any_step_by_any_number_of_threads(name, seed, rng, monkeypatch):
    """Also where threads are worth their start: 1,500 rows."""
    monkeypatch.setattr(cpu_layer, "_threads", 1)
    cfg = CONFIGS[name]
    model = random_model(seed, cfg)
    assert use_native(model)
    sequences = [[rng.randrange(cfg.vocab_size) for _ in range(length)] for length in (900, 430, 170)]
    whole = CachedRun(model, sequences).finish()
    for threads in (2, 3):
        cpu_layer.set_threads(threads)
        other = CachedRun(model, sequences).finish()
        assert all(torch.equal(other.logits(i), whole.logits(i)) for i in range(3))
    by_hand = CachedRun(model, sequences)
    while left := {i: len(ids) - by_hand.done[i] for i, ids in enumerate(sequences) if len(ids) > by_hand.done[i]}:
        by_hand.advance({i: min(left[i], rng.choice([1, 3, 7, 64, 300])) for i in left})
    assert all(torch.equal(by_hand.logits(i), whole.logits(i)) for i in range(3))


@pytest.mark.compiler
def test_scores_that_are_no_numbers_stay_within_bounds(seed):
    """NaN from a broken checkpoint: a NaN answer, not another's memory."""
    model = random_model(seed)
    with torch.no_grad():
        model.model.layers[0].self_attn.indexer.wk.weight.fill_(float("nan"))
        model.model.layers[1].mlp.gate.weight.fill_(float("nan"))
    assert use_native(model)
    assert CachedRun(model, [list(range(1, 100))]).finish().logits().isnan().any()


@pytest.mark.parametrize(
    ("settings", "dtype", "native"),
    [
        pytest.param({}, torch.float32, True, marks=pytest.mark.compiler),
        pytest.param({"deterministic": True}, torch.float32, True, marks=pytest.mark.compiler),
        ({"kv_cache_dtype": "fp8"}, torch.float32, False),
        pytest.param({"enable_return_routed_experts": True}, torch.float32, True, marks=pytest.mark.compiler),
        ({}, torch.bfloat16, False),
    ],
    ids=str,
)
def test_what_an_engine_runs(settings, dtype, native, seed):
    model = random_model(seed, dtype=dtype)
    core = build_core(model, EngineConfig(num_gpu_blocks_override=4, max_num_seqs=2, **settings))
    assert (core.runner.model.trunk is not None) == native
    assert model.trunk is None  # the caller's
    assert dict(core.info.table)["threads"].endswith("native code" if native else "torch")


@pytest.mark.compiler
def test_weights_of_other_shapes_are_not_read(seed):
    """Such as a rank's slices."""
    model = random_model(seed)
    mlp = model.model.layers[0].mlp
    mlp.down_proj.weight = torch.nn.Parameter(mlp.down_proj.weight[:, :8].contiguous())
    with pytest.raises(ValueError, match=r"down: native layers expect \(\d+, \d+\), got \(\d+, 8\)"):
        use_native(model)


def test_without_a_compiler_torch_runs_everything(monkeypatch, seed):
    monkeypatch.setattr(cpu_layer, "library", lambda: None)
    model = random_model(seed)
    assert not use_native(model)
    assert model.trunk is None


def test_without_a_compiler_it_is_said_once_in_a_line(monkeypatch, caplog):
    caplog.set_level("INFO", "glm5")
    monkeypatch.setenv("PATH", "")
    native_code.library.cache_clear()
    try:
        assert [cpu_layer.available(), cpu_layer.available(), cpu_layer.identity()] == [False, False, None]
    finally:
        native_code.library.cache_clear()
    (line,) = caplog.messages
    assert line == (
        "no C++ compiler (c++, g++ or clang++) on the PATH, so no native code: "
        "layers run on torch, at a third to half of the rate"
    )


BUILD = "from glm5.kernels import cpu_layer; print(cpu_layer.library())"


def build(home, path: str, program: str = BUILD, **more: str) -> subprocess.CompletedProcess:
    env = {"HOME": str(home), "PATH": path, **more}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)


def test_a_compiler_that_fails_is_reported_and_leaves_nothing(tmp_path):
    bad = tmp_path / "bin" / "c++"
    bad.parent.mkdir()
    bad.write_text("#!/bin/sh\necho 'error: no such flag' >&2\nexit 1\n")
    bad.chmod(0o755)
    done = build(tmp_path, str(bad.parent))
    assert done.returncode == 0
    assert done.stdout.strip() == "None"
    assert "error: no such flag" in done.stderr
    assert [path for path in (tmp_path / ".cache").rglob("*") if path.is_file()] == []


DIFFERING_ROWS = """
from pathlib import Path
import torch
from glm5.kernels import cpu_layer

cpu_layer._SOURCE = Path({source!r})
generator = torch.Generator().manual_seed(0)
weight, x = (torch.randn(size, 96, generator=generator) for size in (37, 48))
linear = cpu_layer.PackedLinear(weight)
alone = torch.cat([linear(row[None]) for row in x])
print(sum(int((linear(x[:count]) != alone[:count]).any(1).sum()) for count in range(2, 20)))
"""


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("is_left_to_the_compiler", [False, True])
def test_rows_are_alone_where_a_compiler_avoids_chains_of_fused_products(tmp_path, is_left_to_the_compiler):
    """As GCC 13 does where it tunes for Sapphire Rapids. Control: a product and a sum that it may fuse or not."""
    source = Path(shutil.copytree(Path(cpu_layer.__file__).parent, tmp_path / "cpu_layer"), "layer.cpp")
    extra = "--param avoid-fma-max-bits=256"
    if is_left_to_the_compiler:
        vectors = source.with_name("vectors.h")
        text, count = re.subn(r"return Lanes\(_mm.*", "return a * b + c;", vectors.read_text())
        assert count == 2
        vectors.write_text(text)
        extra += " -ffp-contract=fast"
    (compiler := tmp_path / "bin" / "c++").parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {native_code.find_compiler()} "$@" {extra}\n')
    compiler.chmod(0o755)
    if subprocess.run([compiler, "--version"], capture_output=True).returncode:
        pytest.skip("this compiler has no such parameter")
    path, program = f"{compiler.parent}:{os.environ['PATH']}", DIFFERING_ROWS.format(source=str(source))
    done = build(tmp_path, path, program, ATEN_CPU_CAPABILITY="avx2")  # registers of 256 bits
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 0) == is_left_to_the_compiler


@pytest.mark.parametrize(
    ("machine", "used", "left_out"),
    [
        ("x86_64", "DEFAULT", ["-mno-avx"]),
        ("x86_64", "AVX2", ["-mno-avx512f"]),
        ("x86_64", "AVX512", []),
        ("aarch64", "DEFAULT", []),
    ],
)
def test_what_torch_must_not_use_is_not_compiled_for(tmp_path, monkeypatch, machine, used, left_out):
    reported = tmp_path / "told"
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\necho "$@" > {reported}\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    (tmp_path / "some.cpp").touch()
    assert native_code.library(tmp_path / "some.cpp", "slow") is None
    assert [flag for flag in reported.read_text().split() if flag.startswith("-mno")] == left_out


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Compiles a function and calls it, with a home of this test's own: True, unless there is no library."""
    source = tmp_path / "small" / "one.cpp"
    source.parent.mkdir()
    source.write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda: native_code.library.__wrapped__(source, "slow").one() == 1


@pytest.mark.compiler
def test_what_was_compiled_is_kept_and_damage_is_survived(small, tmp_path, monkeypatch, caplog):
    assert small()
    (made,) = (tmp_path / ".cache" / "glm5").iterdir()
    made.unlink()  # what this process has loaded stays whole
    made.write_bytes(b"not a library")
    assert small()
    assert "damaged" in caplog.text
    monkeypatch.setattr(subprocess, "run", None)
    assert small()


@pytest.mark.compiler
def test_what_a_killed_process_had_begun_goes_in_time(small, tmp_path):
    kept = tmp_path / ".cache" / "glm5"
    for name, seconds in (("begun-then", 3600), ("begun-now", 0), ("other", 3600)):
        (kept / name).mkdir(parents=True)
        (kept / name / "half.so").write_bytes(b"half")
        then = time.time() - seconds
        os.utime(kept / name, (then, then))
    assert small()
    assert sorted(path.name for path in kept.iterdir() if path.is_dir()) == ["begun-now", "other"]


@pytest.mark.compiler
def test_a_home_that_cannot_be_written_to_is_no_obstacle(small, tmp_path, monkeypatch, caplog):
    home = tmp_path / "file"
    home.write_text("")
    monkeypatch.setenv("HOME", str(home))
    assert small()
    assert "nothing can be kept" in caplog.text
