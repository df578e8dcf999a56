"""What `--dry-run` says a step needs, against the peak that is counted."""

from pathlib import Path

import pytest
import torch

from glm5.config.train import read_recipe
from glm5.model import packed
from glm5.train import estimate as estimating
from glm5.train.build import Builder
from glm5.train.estimate import estimate, kept_values, memory_parts, state_bytes
from glm5.train.optim.build import Optimizers
from glm5.train.stage_trainer import batch_of
from glm5.train.stages import choose_parameters, losses_of, phase_of
from glm5.train.step import Step
from tests.support.peak import peak_bytes
from tests.support.training import recipe, stage

# Counted / said, for tiny and nano at 64, 256 and 1,024 tokens a sequence: 0.68 to 1.43; here 0.98 to 1.18.
LEAST, MOST = 0.7, 1.5
RECIPES = Path(__file__).parents[3] / "recipes"


@pytest.mark.parametrize("kind", ["pretrain", "warmup", "sparse"])
def test_memory_is_about_what_a_step_takes(tmp_path, kind):
    small = recipe(tmp_path, "out", stage("a", kind, 2).replace("seq_len = 64", "seq_len = 256"))
    built = Builder(small, tmp_path, tmp_path)
    model, part = built.model(torch.device("cpu")), small.stage[0]
    choose_parameters(model, part)
    optimizers = Optimizers(dict(model.named_parameters()), model.cfg, small.optimizer)
    step = Step(model, optimizers, losses_of(small, part, 0), phase_of(part))
    batch = batch_of([built.rows(part).row(i) for i in range(2)], torch.device("cpu"))
    with peak_bytes() as peak:
        step.run([batch], 1e-3)
    said = memory_parts(model.cfg, small, part)
    made = said["gradients"] + said["activations"] + said["logits"]
    assert LEAST < peak.at_most / made < MOST
    assert said["optimizer"] == pytest.approx(optimizers.state_bytes(), rel=0.02)
    assert said["weights"] == pytest.approx(sum(w.nbytes for w in model.parameters()), rel=0.02)
    assert state_bytes(model.cfg, small) == pytest.approx(said["weights"] + said["optimizer"])


def test_what_does_not_fit_is_said_with_what_to_change():
    said = estimate(read_recipe(RECIPES / "glm-5.toml"))
    assert "753,864,119,552 parameters" in said
    assert "does not fit: a shorter seq_len, or a smaller model" in said
    many = read_recipe(RECIPES / "pretrain-nano.toml", ["stage.0.sequences=1000000", "stage.0.first_sequences=1"])
    assert "does not fit: pass_sequences = " in estimate(many)


def test_what_is_not_kept_does_not_count(tmp_path):
    """Computed in bfloat16 under masters in float32; layers that keep their input, or nothing."""

    def said(**values: str) -> dict[str, float]:
        plan = recipe(tmp_path, "out", stage("a", "pretrain", 2, **values), settings=['model.compute="bfloat16"'])
        return memory_parts(plan.model.architecture(), plan, plan.stage[0])

    plain, layer, away = said(), said(recompute='"layer"'), said(recompute='"layer"', offload="true")
    assert plain["weights"] == pytest.approx(1.5 * plain["gradients"], rel=0.3)
    assert away["activations"] < layer["activations"] < 0.7 * plain["activations"]
    assert said(recompute='"mlp"')["activations"] != plain["activations"]


def test_keys_of_each_head_count_in_place_of_latents(tmp_path, monkeypatch):
    """Dense attention as a GPU has it, by torch's fused attention on the CPU, which keeps the same tensors."""
    wide = {"num_attention_heads": 32, "v_head_dim": 24, "kv_lora_rank": 64}
    requested = [*(f"model.config.{key}={value}" for key, value in wide.items()), 'model.dtype="bfloat16"']
    plan = recipe(tmp_path, "out", stage("a", "pretrain", 2), settings=requested)
    model = Builder(plan, tmp_path, tmp_path).model(torch.device("cpu"))
    absorbed = kept_values(model.cfg, plan, plan.stage[0], 2)
    monkeypatch.setattr(packed, "fits", lambda *_: True)
    monkeypatch.setattr(packed, "sequence_attention", _fused)
    monkeypatch.setattr(estimating, "device_of", lambda _: torch.device("cuda"))
    counted = (_kept(model, 512) - _kept(model, 256)) / 256 / 2
    assert LEAST < counted / kept_values(model.cfg, plan, plan.stage[0], 2) < MOST
    assert counted / absorbed < LEAST, "what would be kept of latents is another number"


def _fused(q_THX, k_THX, v_THV, lengths, *, scale):
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THX, k_THX, v_THV))
    try:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    except RuntimeError as error:  # torch 2.13 asks what the processor has, not what it was told to use of it
        if "only supported when avx512 is supported" not in str(error):
            raise
        pytest.skip(f"torch's fused attention in bfloat16, with ATEN_CPU_CAPABILITY=default: {error}")
    return out[0].transpose(0, 1), None


def _kept(model, num_tokens: int) -> int:
    """Bytes of what a pass leaves for its backward, weights left out."""
    weights = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in weights:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.arange(num_tokens) % 300, packed.PackedView([num_tokens], stage="dense"))
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
