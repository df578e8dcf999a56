"""Both forms of the model compute the same, rule by rule, and the map names which is which; a wrong rule is noticed."""

import copy
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from glm5.checkpoint.names import slot_of
from glm5.config.presets import preset
from glm5.config.tensors import tensor_specs
from glm5.engine.runner.fused import fused_model
from glm5.engine.runner.fused.fused_linear import FusedLinear, Rows, wanted
from glm5.engine.runner.fused.fused_model import FusedModel
from glm5.engine.runner.fused.row_sharding import ReplicatedRows
from glm5.kernels.block_scaled import quantize_blocks
from glm5.kernels.quantized_linear import quantized_linear
from glm5.kernels.quantized_weight import WeightFormat
from glm5.kernels.row_codes import quantize
from glm5.kernels.token_quant import token_quant
from glm5.model.attention import SparseLatentAttention
from glm5.model.block import DecoderLayer
from glm5.model.experts import BlockScaledExperts, QuantizedExperts
from glm5.model.glm5 import Glm5
from glm5.model.indexer import Indexer
from glm5.model.linear import BlockScaledLinear, Linear, QuantizedLinear
from glm5.model.lowering import use_block_scaled, use_quantized
from glm5.model.mlp import MLP
from glm5.model.moe import MoE
from glm5.model.seams import Selection
from glm5.parallel.group import ALONE
from tests.support.models import random_model
from tests.support.quantized_weights import random_quantized
from tests.support.steps import Steps, random_ids, typically_far

EXACT = 2e-5  # float32 sums in another order: 1e-6 measured
MAX_LEN = 96


def fp8_model(seed):
    """`nano`, whose widths are whole blocks, with float32 activations."""
    model = random_model(seed, preset("nano"))
    names = sorted({slot_of(spec.name).module for spec in tensor_specs(model.cfg) if spec.fp8})
    plain = {name: copy.deepcopy(model.get_submodule(name)) for name in names}
    use_block_scaled(model, names)
    for name, old in plain.items():
        new = model.get_submodule(name)
        if isinstance(new, BlockScaledLinear):
            weight = quantize_blocks(old.weight.detach())
            new.weight.data, new.weight_scale_inv.data = weight
        elif isinstance(new, BlockScaledExperts):
            new.gate_up_proj.data, new.gate_up_proj_scale_inv.data = quantize_blocks(old.gate_up_proj.detach())
            new.down_proj.data, new.down_proj_scale_inv.data = quantize_blocks(old.down_proj.detach())
    return model


def quantized_model(seed):
    """`nano` with the articles' scheme: attention and MLPs w8a8, experts w4a8."""
    model, gen = random_model(seed, preset("nano")), torch.Generator().manual_seed(seed)
    modules = {slot_of(spec.name).module for spec in tensor_specs(model.cfg) if spec.fp8}
    experts, linear = WeightFormat("int4", None, "int8"), WeightFormat("int8", None, "int8")
    use_quantized(model, {name: experts if name.endswith("experts") else linear for name in sorted(modules)})
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            codes, scale, _ = random_quantized(gen, module.format, *module.weight.shape)
            module.weight.data, module.weight_scale.data = codes, scale
        elif isinstance(module, QuantizedExperts):
            for leaf in ("gate_up_proj", "down_proj"):
                *shape, num_bytes = getattr(module, leaf).shape
                codes, scale, _ = random_quantized(gen, module.format, *shape, 2 * num_bytes)
                getattr(module, leaf).data, getattr(module, f"{leaf}_scale").data = codes, scale
    return model


@pytest.fixture(scope="module", params=["float32", "fp8", "codes"])
def model(request):
    if request.param == "codes":
        return quantized_model(7)
    return random_model(5, preset("tiny")) if request.param == "float32" else fp8_model(6)


@pytest.fixture(scope="module")
def fused(model):
    return FusedModel(model, MAX_LEN)


PASSES = {
    "few keys": [(0, 0, 5), (1, 0, 3)],
    "many rows": [(0, 0, 20), (1, 0, 7)],
    "one row": [(0, 0, 1)],
    "long": [(0, 0, 60)],
}


@pytest.mark.parametrize("rows", PASSES.values(), ids=PASSES)
@torch.inference_mode()
def test_hidden_states_and_drafts(model, fused, rows):
    """A pass, then one more row of each sequence, which finds what the first pass wrote."""
    there, here = Steps(model, 2, MAX_LEN), Steps(model, 2, MAX_LEN)
    for passes in (rows, [(slot, start + count, 1) for slot, start, count in rows]):
        ids = random_ids(model, sum(count for _, _, count in passes) + 2, seed=1)
        want = model(ids, there.view(passes, padding=2))[:-2]
        got = fused.hidden(ids, here.view(passes, padding=2))[:-2]
        assert typically_far(got, want) < EXACT
        hidden = torch.cat([want, want[:2].flip(0), want[:1]])[: len(ids)]
        want, used = model.draft(ids, hidden, there.view(passes, padding=2))
        got, own = fused.draft(ids, hidden, here.view(passes, padding=2))
        assert typically_far(got[:-2], want[:-2]) < EXACT
        again, _ = model.draft(ids, hidden, there.view(passes, padding=2), used)
        got, _ = fused.draft(ids, hidden, here.view(passes, padding=2), own)
        assert typically_far(got[:-2], again[:-2]) < EXACT
    assert typically_far(fused.logits(want), model.head(want)) == 0


@torch.inference_mode()
def test_whole_prompts_expand_keys(model, fused):
    rows = [(0, 0, 5), (1, 0, 8)]
    there, here = Steps(model, 2, MAX_LEN), Steps(model, 2, MAX_LEN)
    ids = random_ids(model, 15, seed=2)
    got = fused.hidden(ids, here.view(rows, padding=2, whole=True))[:-2]
    assert typically_far(got, model(ids, there.view(rows, padding=2))[:-2]) < EXACT
    after = [(0, 5, 1), (1, 8, 1)]
    assert typically_far(fused.hidden(ids[:2], here.view(after)), model(ids[:2], there.view(after))) < EXACT


@torch.inference_mode()
def test_attention_rule(model, fused):
    """The layer's attention alone, also with keys that are given."""
    layer, own = model.model.layers[0].self_attn, fused.layers[0].attention
    there, here = Steps(model, 1, MAX_LEN), Steps(model, 1, MAX_LEN)
    x_TD = torch.randn(40, model.cfg.hidden_size, generator=torch.Generator().manual_seed(3))
    for given in (None, Selection(torch.arange(8).int().repeat(40, 1))):
        view, other = there.view([(0, 0, 40)]), here.view([(0, 0, 40)])
        rope = model._rope(view)
        want, chosen = layer(x_TD, rope, view, given)
        got, picked = own(Rows(x_TD), rope, other, given, ReplicatedRows(ALONE))
        assert typically_far(got, want) < EXACT
        assert torch.equal(chosen.keys_TK, picked.keys_TK)


@torch.inference_mode()
def test_mlp_rules(model, fused):
    x_TD = torch.randn(20, model.cfg.hidden_size, generator=torch.Generator().manual_seed(4))
    view = Steps(model, 1, MAX_LEN).view([(0, 0, 20)])
    for layer, own in zip(model.model.layers, fused.layers, strict=True):
        assert typically_far(own.mlp(Rows(x_TD), view, ReplicatedRows(ALONE)), layer.mlp(x_TD)) < EXACT


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_products_find_their_rows_quantized(num_tokens, monkeypatch):
    """Of codes: no product quantizes what it reads."""
    widths = []
    model = quantized_model(7)
    fused, view = FusedModel(model, MAX_LEN), Steps(model, 1, MAX_LEN).view([(0, 0, num_tokens)])

    def quantized(x_TD, *given, **options):
        widths.append(x_TD.shape[1])
        return token_quant(x_TD, *given, **options)

    monkeypatch.setattr("glm5.kernels.quantized_linear.reference.token_quant", quantized)
    monkeypatch.setattr(QuantizedExperts, "__call__", lambda self, x_TD, *choice: torch.zeros_like(x_TD))
    with torch.inference_mode():
        fused.hidden(random_ids(model, num_tokens, seed=1), view)
    assert not widths
    quantized_linear(
        torch.ones(1, 128), random_quantized(torch.Generator(), WeightFormat("int8", None, "int8"), 4, 128)
    )
    assert widths == [128]


def test_products_of_two_kinds_are_not_copied_together(monkeypatch):
    """The recipes leave wk in bfloat16 beside codes."""
    model, plain = quantized_model(7), random_model(7, preset("nano"))
    for layer, theirs in zip(model.model.layers, plain.model.layers, strict=True):
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.wk = theirs.self_attn.indexer.wk
    ids, views = random_ids(model, 40, seed=1), [Steps(model, 1, MAX_LEN).view([(0, 0, 40)]) for _ in range(2)]
    with torch.inference_mode():
        want = model(ids, views[0])
        fused = FusedModel(model, MAX_LEN)
        assert len(fused.layers[0].attention.of_input.runs) == 2
        monkeypatch.setattr(FusedLinear, "__call__", single_run(FusedLinear.__call__))
        assert typically_far(fused.hidden(ids, views[1]), want) < EXACT


def single_run(call):
    def checked(self, rows, start=0, stop=None):
        stop = len(self.linears) if stop is None else stop
        assert sum(bool(range(max(run.start, start), min(run.stop, stop))) for run in self.runs) == 1
        return call(self, rows, start, stop)

    return checked


def test_codes_are_for_products_that_read_them():
    x = torch.randn(20, 128)
    blocks, tokens = (Rows(x, quantize(x, kind)) for kind in ("blocks", "int8"))
    int8, int4 = (QuantizedLinear(128, 8, WeightFormat(weight, None, "int8")) for weight in ("int8", "int4"))
    fp8, plain = BlockScaledLinear(128, 8), Linear(128, 8)
    assert tokens.codes_for(int8) is tokens.quantized
    assert blocks.codes_for(fp8) is blocks.quantized
    assert not any(rows.codes_for(linear) for rows, linear in ((blocks, int8), (tokens, fp8), (Rows(x), int8)))
    assert not any(tokens.codes_for(linear) for linear in (int4, plain))
    assert [wanted(linears, 20) for linears in ([plain, int8], [fp8], [fp8, plain], [int4])] == [
        "int8", "blocks", None, None,
    ]  # fmt: skip
    assert wanted([fp8], 16) is None


def test_a_stack_holds_nothing_twice():
    linears = [Linear(16, rows) for rows in (8, 24, 4)]
    for linear in linears:
        torch.nn.init.normal_(linear.weight)
    x_TD = torch.randn(3, 16)
    want = [linear(x_TD).detach() for linear in linears]
    stack = FusedLinear(linears)
    assert len({linear.weight.untyped_storage().data_ptr() for linear in linears}) == 1
    torch.testing.assert_close(stack(Rows(x_TD)), torch.cat(want, dim=1))
    torch.testing.assert_close(stack(Rows(x_TD), 1), torch.cat(want[1:], dim=1))
    torch.testing.assert_close(stack(Rows(x_TD), 0, 2), torch.cat(want[:2], dim=1))
    assert len(stack.runs) == 1
    with torch.no_grad():
        linears[1].weight.copy_(torch.ones(24, 16))
    torch.testing.assert_close(stack(Rows(x_TD), 1, 2)[:, 0], x_TD.sum(dim=1))
    linears[2].weight.data = torch.zeros(4, 16)  # lies elsewhere now
    place = stack.place
    stack.join()
    assert stack.place != place
    assert not stack(Rows(x_TD))[:, -4:].any()


@torch.no_grad()
def test_weights_replaced_in_place_are_used(model):
    changed = copy.deepcopy(model)
    fused = FusedModel(changed, MAX_LEN)
    ids = random_ids(model, 6, seed=7)
    for layer in changed.model.layers:
        held = dict(layer.self_attn.kv_b_proj.named_parameters())
        held.get("weight_scale_inv", held.get("weight_scale", held["weight"])).mul_(1.5)
    fused.refresh()
    view, other = (Steps(model, 1, MAX_LEN).view([(0, 0, 6)]) for _ in range(2))
    assert typically_far(fused.hidden(ids, view), changed(ids, other)) < EXACT


@torch.no_grad()
def test_the_budget_notices_one_norm(model):
    wrong = copy.deepcopy(model)
    wrong.model.layers[0].self_attn.q_a_layernorm.weight.mul_(1.3)
    ids = random_ids(model, 40, seed=8)
    views = [Steps(model, 1, MAX_LEN).view([(0, 0, 40)]) for _ in range(2)]
    assert typically_far(FusedModel(wrong, MAX_LEN).hidden(ids, views[0]), model(ids, views[1])) > 1000 * EXACT


def test_neighbours_of_one_kind_are_one_product(seed):
    """A plain weight, two as codes of one form, one of another form, FP8 of which one ends within a block."""
    gen = torch.Generator().manual_seed(seed)
    linears = [Linear(256, 8), *(QuantizedLinear(256, rows, WeightFormat("int8", None, "int8")) for rows in (24, 4))]
    linears += [
        QuantizedLinear(256, 8, WeightFormat("int4", 128)),
        *(BlockScaledLinear(256, rows) for rows in (128, 40, 128)),
    ]
    for linear in linears:
        weight = torch.randn(linear.weight.shape[0], 256, generator=gen)
        if isinstance(linear, Linear):
            linear.weight.data = weight
        elif isinstance(linear, QuantizedLinear):
            linear.weight.data, linear.weight_scale.data, _ = random_quantized(gen, linear.format, *weight.shape)
        else:
            linear.weight.data, linear.weight_scale_inv.data = quantize_blocks(weight)
    rows = Rows(torch.randn(3, 256, generator=gen))
    want = [linear(rows.x_TD) for linear in linears]
    stack = FusedLinear(linears)
    assert [list(run) for run in stack.runs] == [[0], [1, 2], [3], [4, 5], [6]]
    for start, stop in ((0, 7), (1, 3), (2, 5), (5, None), (0, 1)):
        torch.testing.assert_close(stack(rows, start, stop), torch.cat(want[start:stop], dim=1))


def test_the_map_names_both_forms():
    """docs/map.md, "Two forms of the model": each row names a method of the definition and one of the second form."""
    text = (Path(__file__).parents[3] / "docs/map.md").read_text(encoding="utf-8").split("## Two forms of the model")[1]
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|", text.split("\n## ")[0], flags=re.MULTILINE)
    definition = {kind.__name__: kind for kind in (Glm5, DecoderLayer, SparseLatentAttention, Indexer, MoE, MLP)}
    for ours, other in rows:
        kind, _, method = ours.partition(".")
        assert callable(getattr(definition.pop(kind, Glm5), method))
        assert callable(attrgetter(other)(fused_model))
    assert not definition, "every class of the definition has a row"
