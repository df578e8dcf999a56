"""What a report says: figures against the models run whole, and a page that holds them."""

import json

import pytest
import torch

from glm5.checkpoint.load import load
from glm5.config.quantize import QuantizeConfig
from glm5.quantize.job import held_out, prepare
from glm5.quantize.measure import measure
from glm5.quantize.run import quantize

BRIEF = {"num_samples": 3, "sample_len": 24, "device": "cpu", "min_tokens": 2}


@pytest.fixture(scope="module")
def made(small_bf16, tmp_path_factory):
    out = tmp_path_factory.mktemp("measured") / "out"
    given = {"model": str(small_bf16), "out": str(out), "scheme": "w4a8", "held_out_tokens": 96, **BRIEF}
    return quantize(settings := QuantizeConfig.model_validate(given)), settings


def test_the_report_holds_what_was_measured(made):
    path, _ = made
    found = json.loads((path / "quantization.json").read_text())
    assert found["quality"]["num_tokens"] == 96
    assert found["quality"]["kl"] > 0
    assert len(found["quality"]["layers"]) == 3
    assert found["parts"]["experts"]["bits"] == pytest.approx(4.25, abs=0.01)  # a float32 scale for 128 codes
    assert found["parts"]["router"]["bits"] > 16  # its bias is float32
    assert sum(found["tokens_per_expert"]["1"]) == 72 * 2
    assert found["modules"]["model.layers.1.mlp.experts.*.down_proj"]["output"] < 0.5
    assert found["smoothing"]["1"]["mlp.experts.*.up_proj"]["error"] <= (
        found["smoothing"]["1"]["mlp.experts.*.up_proj"]["error_before"] * 1.001
    )
    page = (path / "quantization.html").read_text()
    assert "KL to the original" in page
    assert page.count("<svg") >= 4
    assert "http" not in page


def test_a_model_that_is_not_quantized_is_itself(small_bf16, made, tmp_path):
    """The original, walked layer by layer, gives the logits of the model in memory."""
    from glm5.quantize.measure import Walk, original

    job = prepare(made[1])
    samples = held_out(job)
    walk = Walk(job.cfg, original(job), samples).to_end()
    model = load(small_bf16, dtype="float32")
    for ids, logp_TW in zip(samples, walk.log_probs(), strict=True):
        want = model.logits(ids).float().log_softmax(-1)
        assert (logp_TW - want).abs().max() < 1e-4


def test_figures_are_the_formulas(made):
    """KL, top-1 and perplexity over written files, again from log-probabilities in float64."""
    from glm5.quantize.measure import Walk, Written, original

    path, settings = made
    job = prepare(settings)
    samples = held_out(job)
    quality = measure(job, path, samples)
    p = [x.double() for x in Walk(job.cfg, original(job), samples).to_end().log_probs()]
    q = [x.double() for x in Walk(job.cfg, Written(path).layers(job), samples).to_end().log_probs()]
    kl = torch.cat([(one.exp() * (one - other)).sum(-1) for one, other in zip(p, q, strict=True)])
    same = torch.cat([one.argmax(-1) == other.argmax(-1) for one, other in zip(p, q, strict=True)])
    loss = torch.cat([-x[:-1].gather(-1, torch.tensor(ids[1:])[:, None]) for ids, x in zip(samples, q, strict=True)])
    assert quality.kl == pytest.approx(kl.mean().item(), rel=1e-4)
    assert quality.top1 == pytest.approx(same.double().mean().item())
    assert quality.perplexity == pytest.approx(loss.mean().exp().item(), rel=1e-4)
    control = measure(job, path, samples[:1])
    assert control.kl != quality.kl
