"""Steps of a known size: which figures there are, what they are made from, and when there are none."""

import json

import numpy as np
import pytest

from glm5.bench.latency.expert_coverage import check, coverage_of, expected_experts
from glm5.bench.latency.measure import fitted, measure
from glm5.bench.latency.report import table
from glm5.bench.latency.requests import ask
from glm5.cli.main import main
from glm5.common.errors import ConfigError, GlmError
from glm5.config.bench import LatencyConfig
from glm5.config.presets import preset
from glm5.engine.llm import LLM
from tests.support.models import random_model

DEPTH, MEAN = 2, 2.2
SMALL = {"preset": "tiny", "load_format": "dummy", "batch": (1, 2, 4), "context": (96,), "input_len": 24}
SETTINGS = LatencyConfig(**SMALL, output_len=6)


@pytest.fixture(scope="module")
def llm():
    options = {"num_speculative_tokens": DEPTH, "adaptive_speculation": False, "load_format": "dummy"}
    with LLM(
        random_model(5),
        max_num_seqs=4,
        num_gpu_blocks_override=32,
        max_model_len=192,
        simulate_acceptance=MEAN,
        enable_return_routed_experts=True,
        **options,
    ) as llm:
        yield llm


def test_every_figure_is_found(llm):
    lines = []
    found = measure(SETTINGS, llm, lines.append)
    assert list(found["decode_ms"]) == ["1", "2", "4"]
    assert list(found["decode_ms_by_context"]) == ["96"]
    assert found["kv_tokens"] == 32 * 64
    assert found["kernels_built_late"] == 0
    assert found["simulated_acceptance"] == MEAN
    assert 1 < found["mtp_tokens_a_step"] <= 1 + DEPTH
    assert all(found[name] > 0 for name in ("prefill_ms", "prefill_tok_s", "mtp_tok_s"))
    assert found["experts"]["4"]["expected"] == pytest.approx(8 * (1 - 0.75**4))
    assert "SIMULATED" in table(found)
    assert any("SIMULATED" in line for line in lines)
    json.dumps(found)


def test_steps_are_timed_without_drafts(llm):
    before = sum(llm.stats()["speculation"]["drafted"])
    received = ask(llm, [[1, 2, 3], [4, 5]], max_tokens=5)
    assert [sum(one.tokens) for one in received] == [5, 5]
    assert all(count == 1 for one in received for count in one.tokens)
    assert sum(llm.stats()["speculation"]["drafted"]) == before


def test_listening_ends_when_enough_was_heard(llm):
    (received,) = ask(llm, [[1, 2, 3]], max_tokens=100, until=lambda received: len(received[0].at) >= 3)
    assert 3 <= len(received.at) < 20
    assert llm.stats()["decoding"] == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"batch": (64,)}, r"batch: got 64, of .* each; allowed: \d+, as the cache has"),
        ({"batch": (5,)}, "up to --max-num-seqs"),
        ({"context": (400,)}, r"context: got 400, .* allowed: up to 170, as sequences have 192 tokens"),
        ({"context": (9000,)}, r"context: got 9000; allowed: up to \d+, as the cache has"),
    ],
)
def test_what_does_not_fit_is_refused(llm, changes, why):
    with pytest.raises(ConfigError, match=why):
        measure(SETTINGS.model_copy(update=changes), llm, lambda _line: None)


def test_lengths_are_checked_before_the_start():
    """Contexts that are nobody's wish are left out; others are refused, with what is allowed."""
    usual = LatencyConfig(preset="tiny", load_format="dummy", batch=(1, 2), output_len=6)
    assert fitted(usual, 131072).context == (32768,)
    assert fitted(usual, 131072 + 22).context == (32768, 131072)
    assert fitted(usual, 2078).context == ()
    with pytest.raises(ConfigError, match=r"input_len: got 2048, and answers of 30 tokens .* together up to 2077"):
        fitted(usual, 2077)
    wished = LatencyConfig(preset="tiny", load_format="dummy", batch=(1,), context=(100, 131072), input_len=50)
    with pytest.raises(ConfigError, match=r"context: got 131072, and 22 tokens .* allowed: up to 131050"):
        fitted(wished, 131072)


def test_routing_that_spreads_is_told_from_routing_that_does_not():
    cfg, rng = preset("glm-5"), np.random.default_rng(0)
    even = [np.stack([rng.permutation(256)[:8] for _ in range(75)]) for _ in range(128)]
    for count in (1, 8, 32, 64, 128):
        spread = coverage_of(cfg, even[:count])
        assert spread.mean == pytest.approx(expected_experts(cfg, count), rel=0.02)
        check([spread])
    few = [experts % 200 for experts in even]
    check([coverage_of(cfg, few[:1])])  # one token says nothing
    with pytest.raises(GlmError, match="routing did not spread: of 128 tokens"):
        check([coverage_of(cfg, few)])
    with pytest.raises(GlmError, match="did not spread"):
        check([coverage_of(cfg, [even[0]] * 8)])


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("", "either --model or --preset; got neither"),
        ("--preset tiny --model x", "got both"),
        ("--preset tiny", "--load-format dummy"),
        ("--model x --num-hidden-layers 3", "--num-hidden-layers with --preset, not with --model"),
        ("--model x --context 500 --weights w8a8", "--weights with --preset"),
        ("--preset tiny --load-format dummy --against transformers", "--against with --model"),
        ("--preset tiny --load-format dummy --batch 9 --max-num-seqs 8", "up to --max-num-seqs (8); got 9"),
        ("--model x --simulate-acceptance 2", "only with --load-format dummy"),
    ],
)
def test_flags_that_do_not_fit_together(flags, why, capsys):
    assert main(["bench", "latency", *flags.split()]) == 2
    assert why in capsys.readouterr().err


def test_a_batch_beyond_the_usual_most_has_its_sequences_and_layers_need_no_experts(capsys):
    """Of the batches that are measured by default, too, which were refused after the start."""
    flags = "--preset tiny --load-format dummy --dtype float32 --num-hidden-layers 1 --batch 65 --context 32"
    flags += " --input-len 4 --output-len 1 --max-model-len 192 --num-gpu-blocks-override 400 --device cpu"
    assert main(["bench", "latency", *flags.split()]) == 0
    assert "decoding step, batch 65" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kinds"), [("bfloat16", "float32 on"), ("w4a8-channel", "w8a8, w4a8 weights")])
def test_the_command_measures_two_ranks(weights, kinds, tmp_path, capsys):
    path = tmp_path / "steps.json"
    flags = f"--preset tiny --load-format dummy --weights {weights} -tp 2 --batch 1 2 --context 96"
    flags += " --dtype float32" if weights == "bfloat16" else ""
    flags += " --input-len 24 --output-len 6 --max-model-len 192 --num-speculative-tokens 2 --simulate-acceptance 2.2"
    assert main(["bench", "latency", *flags.split(), "--empty-kernel-cache", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert found["layers"] == 4
    assert found["settings"]["tensor_parallel_size"] == 2
    said = capsys.readouterr().out
    assert "decoding step, batch 2" in said
    assert kinds in said
