"""The exact training pass: its log-probabilities are, bit for bit, those that a deterministic engine reported.

    forward     the engine's own prompt pass over whole sequences, over the weights that are trained (engine_pass.py)
    backward    each layer is computed again, from the input that the engine's arithmetic gave it, by the definition's
                torch operations, with the keys and experts that the engine chose (graft.py)

It is the pass whose gradient is taken, not a second scoring. So with the weights that sampled, the ratio of the
policies is one, not nearly one. The indexers get no gradient. Tokens that sequences share from their start on are
computed once, in both directions (prefixes.py).

    exact = ExactPass(model, threads=1)
    model.impl = exact                                   # from now on `model(ids_T, PackedView(lengths))` is exact
    objective = RLObjective(preset, scorer=exact.logprobs)
"""

from functools import partial

import torch
from torch import Tensor

from glm5.common.errors import ConfigError, TrainingError
from glm5.engine.shared_model import SharedModel
from glm5.kernels import cpu_layer
from glm5.kernels.sampled_logprobs import Kept, sampled_logprobs
from glm5.model.block import DecoderLayer
from glm5.model.glm5 import Glm5
from glm5.model.moe import MoE, RecordedExperts
from glm5.model.packed import PackedView
from glm5.model.seams import KVView, Rope, Selection
from glm5.rl.training.engine_pass import EnginePass
from glm5.rl.training.graft import graft
from glm5.rl.training.prefixes import Prefixes, SharedView

WAVE_ON_CPU, WAVE_ON_GPU = 64, 4096
"""Tokens that are computed in the time that a wave of the engine's pass costs: on a GPU its kernels are launched."""


class ExactPass:
    """Of `model`, as `glm5.load` gives it, on one device. `threads`: of the engine (`EngineConfig.num_threads`).

    ConfigError where this process would compute otherwise: layers on torch depend on the number of torch's threads. For
    `fused` see `EnginePass`.
    """

    def __init__(self, model: Glm5, *, threads: int, fused: bool | None = None):
        self.model, self._shared = model, SharedModel(model)
        self.engine = EnginePass(self._shared.model, fused)
        if self.engine.is_native:
            cpu_layer.set_threads(threads)
        elif model.device.type == "cpu" and torch.get_num_threads() != threads:
            raise ConfigError(
                f"threads: the engine has {threads}, and torch {torch.get_num_threads()} here; an exact training pass "
                f"needs the same number: call torch.set_num_threads({threads}) first"
            )

    def check(self, arithmetic: str | None) -> None:
        """ConfigError for an engine of another arithmetic (`EngineInfo.arithmetic`)."""
        if arithmetic != self.engine.arithmetic:
            raise ConfigError(
                f"the engine computes in {arithmetic or 'an order that depends on the batch'}, this training pass in "
                f"{self.engine.arithmetic}; an exact pass needs the same: start the engine with deterministic, "
                "kv_cache_dtype auto, one rank, and the model's dtype, device and number of threads"
            )

    def __call__(self, ids_T: Tensor, view: KVView) -> Tensor:
        """A `HiddenImpl`. TrainingError for views other than of whole sequences that attend to selected keys."""
        if not isinstance(view, PackedView) or not view.whole or view.stage != "sparse" or view.learn_index:
            raise TrainingError(
                "an exact pass computes whole sequences with the keys that indexers select, and trains no indexer; "
                f"got a {type(view).__name__}: train with sparse attention and frozen indexers, on one device"
            )
        return self.hidden(ids_T, view.lengths)

    def hidden(self, ids_T: Tensor, lengths: list[int]) -> Tensor:
        """Hidden states [T, D] after the final norm, as `Glm5.forward` of a `PackedView`, differentiable in all weights
        but the indexers'."""
        if self._shared.has_changed(closely=True):
            self._shared.adopt()
            self.engine.weights_changed()
        prefixes, model = self._prefixes(ids_T, lengths), self.model
        trace = self.engine.run(ids_T, lengths, prefixes)
        cfg, trunk = model.cfg, model.model
        view = SharedView(lengths, prefixes, ids_T.device)
        rope = Rope.at(view.positions_T, cfg.qk_rope_head_dim, cfg.rope_theta, trunk.norm.weight)
        experts = iter(trace.expert_ULA.unbind(1))
        x_UD = trunk.embed_tokens(view.first(ids_T))
        for layer, keys_UK, after_UD in zip(trunk.layers, trace.keys, trace.stream_LUD[1:].unbind(), strict=False):
            assert isinstance(layer, DecoderLayer), f"{type(layer)=}"
            expert_UA = next(experts) if isinstance(layer.mlp, MoE) else None
            selection = Selection(None if view.max_len <= cfg.index_topk else keys_UK)
            run = partial(_run, layer, rope=rope, view=view, selection=selection, expert_UA=expert_UA)
            x_UD = graft(after_UD, run, x_UD, list(layer.parameters()))
        return view.spread(graft(trace.hidden_UD, trunk.norm, x_UD, [trunk.norm.weight]))

    def _prefixes(self, ids_T: Tensor, lengths: list[int]) -> Prefixes:
        """What the sequences share, where computing it first costs less than computing it again."""
        found = Prefixes.of(ids_T.cpu().numpy(), lengths)
        wave = WAVE_ON_CPU if ids_T.is_cpu else WAVE_ON_GPU
        return found if found.num_saved > wave * (len(found.waves) - 1) else Prefixes.none(lengths)

    def logprobs(
        self,
        hidden_TD: Tensor,
        weight_WD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        kept: Kept | None = None,
        *,
        chunk: int = 4096,
    ) -> tuple[Tensor, Tensor]:
        """`kernels.sampled_logprobs`, whose logits the engine's head computes: of tokens that an engine drew, its
        `tempered` log-probabilities. `weight_WD`: the model's lm_head."""
        given = hidden_TD, weight_WD, target_T, temperature_T, kept
        return sampled_logprobs(*given, chunk=chunk, head=self.engine.head)


def _run(
    layer: DecoderLayer,
    x_UD: Tensor,
    *,
    rope: Rope,
    view: SharedView,
    selection: Selection,
    expert_UA: Tensor | None,
) -> Tensor:
    """The definition's layer, with given keys and experts."""
    if expert_UA is None or not isinstance(layer.mlp, MoE):
        return layer.compute(x_UD, rope, view, selection)[0]
    router = layer.mlp.gate
    router.recorded = RecordedExperts(expert_UA)
    try:
        return layer.compute(x_UD, rope, view, selection)[0]
    finally:
        router.recorded = None
