"""Calibration samples in the model: hidden states between layers, and inputs of linear layers.

Samples are distributed over the devices in packs; on each, a layer computes one pack at a time. Its output overwrites
its input. The next layer needs only this output and the keys that the last indexer selected; both are stored on disk,
so that a run can be resumed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from glm5.checkpoint.names import STACK
from glm5.checkpoint.shard import CODES, read_header, read_tensor
from glm5.checkpoint.writer import TensorLayout, write_file
from glm5.config.model import ModelConfig
from glm5.model.block import DecoderLayer
from glm5.model.packed import PackedView
from glm5.model.seams import Rope, Selection
from glm5.quantize.devices import on_devices
from glm5.quantize.layer import FakeQuantizedExperts, device_of, linears_of

PACK_TOKENS = 4096
# What a module is given goes by the module that makes it: one of several that read the same stands for all.
SITES = {
    "self_attn.q_a_proj": "input_layernorm",
    "self_attn.q_b_proj": "self_attn.q_a_layernorm",
    "self_attn.o_proj": "self_attn.kv_b_proj",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.shared_experts.gate_proj": "post_attention_layernorm",
    "mlp.down_proj": "mlp.up_proj",
    "mlp.shared_experts.down_proj": "mlp.shared_experts.up_proj",
}
READS = {
    "self_attn.kv_a_proj_with_mqa": "input_layernorm",
    "self_attn.indexer.wk": "input_layernorm",
    "self_attn.indexer.weights_proj": "input_layernorm",
    "self_attn.indexer.wq_b": "self_attn.q_a_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
    "mlp.shared_experts.up_proj": "post_attention_layernorm",
    "mlp.gate": "post_attention_layernorm",
    f"{STACK}gate_proj": "post_attention_layernorm",
    f"{STACK}up_proj": "post_attention_layernorm",
    **SITES,
}


@dataclass
class Pack:
    """Some samples one after the other: hidden states [T, D], and the last selection."""

    lengths: list[int]
    hidden_TD: Tensor
    selection: Selection | None = None


@dataclass
class Inputs:
    """What a layer's linear layers were given over all samples: [T, I] by the module that made it (`READS`).

    Of routed experts: which experts each token went to, and with what weights, [T, A].
    """

    by_site: dict[str, Tensor] = field(default_factory=dict)
    expert_TA: Tensor | None = None
    weight_TA: Tensor | None = None

    def of(self, module: str) -> Tensor | None:
        """What a module reads; None where it was not seen (kv_b_proj, down_proj of routed experts)."""
        return self.by_site.get(READS.get(module, ""))

    def routed(self, expert: int, *, everyone: bool) -> Tensor:
        """Rows of the tokens that an expert is calibrated on: those routed to it, or all."""
        assert self.expert_TA is not None, f"{expert=}"
        if everyone:
            return torch.arange(len(self.expert_TA), device=self.expert_TA.device)
        return (self.expert_TA == expert).any(-1).nonzero().flatten()

    def tokens_per_expert(self, num_experts: int) -> Tensor | None:
        if self.expert_TA is None:
            return None
        return torch.bincount(self.expert_TA.flatten(), minlength=num_experts)


class Activations:
    """All packs, between two layers."""

    def __init__(self, packs: list[Pack]) -> None:
        self.packs = packs

    @classmethod
    def embed(
        cls, samples: Sequence[Sequence[int]], table_WD: Tensor, devices: Sequence[torch.device] = ()
    ) -> "Activations":
        """Rows of the embedding for samples of token ids; packs go to the devices in turn, or to the table's."""
        packs: list[Pack] = []
        for idx, group in enumerate(packed(samples)):
            ids_T = torch.tensor([token for sample in group for token in sample], device=table_WD.device)
            device = devices[idx % len(devices)] if devices else table_WD.device
            packs.append(Pack([len(sample) for sample in group], table_WD[ids_T].to(device)))
        return cls(packs)

    def through(self, layers: Sequence[DecoderLayer], cfg: ModelConfig, layer_idx: int) -> None:
        """Replace every pack by the layer's output. `layers`: the same layer on each device."""
        self._run(layers, cfg, layer_idx, keep=True)

    def inputs(self, layers: Sequence[DecoderLayer], cfg: ModelConfig, layer_idx: int) -> Inputs:
        """Run the layer and keep what its linear layers are given, on the first device; the packs stay as they are."""
        modules = [{name: m for name, m in linears_of(layer).items() if name in SITES} for layer in layers]
        routed = [e for layer in layers if isinstance(e := getattr(layer.mlp, "experts", None), FakeQuantizedExperts)]
        linears = [module for some in modules for module in some.values()]
        for module in linears:
            module.seen = []
        for experts in routed:
            experts.seen = []
        self._run(layers, cfg, layer_idx, keep=False)
        device = device_of(layers[0])
        found = Inputs(
            {SITES[name]: self._gathered([some[name].seen for some in modules], device) for name in modules[0]}
        )
        if routed:
            found.weight_TA = self._gathered([[weight_TA for weight_TA, _ in e.seen or []] for e in routed], device)
            found.expert_TA = self._gathered([[expert_TA for _, expert_TA in e.seen or []] for e in routed], device)
        for each in (*linears, *routed):
            each.seen = None
        return found

    def _gathered(self, by_device: Sequence[list[Tensor] | None], device: torch.device) -> Tensor:
        """What each device saw, in the order of the packs."""
        num = len(by_device)
        seen = [by_device[idx % num] for idx in range(len(self.packs))]
        return torch.cat([some[idx // num].to(device) for idx, some in enumerate(seen) if some is not None])

    def _run(self, layers: Sequence[DecoderLayer], cfg: ModelConfig, layer_idx: int, *, keep: bool) -> None:
        def work(number: int, _device: torch.device) -> None:
            with torch.no_grad():
                for pack in self.packs[number :: len(layers)]:
                    view = PackedView(pack.lengths, pack.hidden_TD.device)
                    rope = Rope.at(view.positions_T, cfg.qk_rope_head_dim, cfg.rope_theta, pack.hidden_TD)
                    inherited = None if cfg.has_indexer(layer_idx) else pack.selection
                    out_TD, selection = layers[number](pack.hidden_TD, rope, view, inherited)
                    if keep:
                        pack.hidden_TD, pack.selection = out_TD, selection

        on_devices([device_of(layer) for layer in layers], range(len(layers)), work)

    def save(self, path: Path) -> None:
        """Write all that the next layer needs."""
        tensors: dict[str, Tensor] = {}
        for idx, pack in enumerate(self.packs):
            tensors[f"{idx}.hidden"] = pack.hidden_TD
            if pack.selection is not None and pack.selection.keys_TK is not None:
                tensors[f"{idx}.keys"] = pack.selection.keys_TK
        layout = [TensorLayout(name, CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
        for _ in write_file(path, layout, iter(tensors.values())):
            pass

    def restore(self, path: Path) -> None:
        """Continue from a file of `save`, with the same samples."""
        entries = {entry.name: entry for entry in read_header(path)}
        for idx, pack in enumerate(self.packs):
            device = pack.hidden_TD.device
            pack.hidden_TD = read_tensor(path.parent, entries[f"{idx}.hidden"]).to(device)
            keys = entries.get(f"{idx}.keys")
            pack.selection = Selection(None if keys is None else read_tensor(path.parent, keys).to(device))


def packed(samples: Sequence[Sequence[int]], most: int = PACK_TOKENS) -> Iterator[list[Sequence[int]]]:
    """Samples in groups of at most `most` tokens, in their order."""
    group: list[Sequence[int]] = []
    for sample in samples:
        if group and sum(map(len, group)) + len(sample) > most:
            yield group
            group = []
        group.append(sample)
    if group:
        yield group
