"""The architecture, as a Hugging Face config.json states it (GLM-5, 5.1, 5.2, 5.3 and their re-exports).

Field names are the file's keys. What the file states in several ways is resolved once, here, by
`glm5.config.resolve`: after that, `indexer_types[i]`, `mlp_layer_types[i]` and `rope_theta` are the truth.
Every error is a `ConfigError` that names key, value and what is allowed.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glm5.common.bounded import SETTINGS, read_bounded_text
from glm5.common.errors import ConfigError
from glm5.config import resolve
from glm5.config.refusal import first_error, refuse

Size = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]

# Far beyond any model (GLM-5: 78 layers, 20 thousand experts); a damaged number would take all memory for names.
MAX_LAYERS, MAX_EXPERTS = 4096, 2**18

_SHARING = ("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern")

# A key of the first line given to `replace` invalidates the per-layer list on the second.
_RESOLVED_FROM = {
    "indexer_types": ("num_hidden_layers", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
    "mlp_layer_types": ("num_hidden_layers", "first_k_dense_replace"),
}


class ModelConfig(BaseModel):
    """One GLM-5 architecture. Made by `from_dict`, `from_file` or `replace`, which check everything."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    vocab_size: Size
    hidden_size: Size
    num_hidden_layers: Size
    """Layers of the trunk; the MTP layer, where there is one, has this index."""
    num_attention_heads: Size
    q_lora_rank: Size
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    """Rotary width, of attention and indexer alike. `head_dim` of the file is misleading and never read."""
    v_head_dim: Size
    intermediate_size: Size
    """Width of a dense MLP."""
    moe_intermediate_size: Size
    """Width of one expert."""
    n_routed_experts: Size
    num_experts_per_tok: Size
    n_shared_experts: Size = 1
    n_group: Size = 1
    topk_group: Size = 1
    routed_scaling_factor: Positive
    norm_topk_prob: Flag
    first_k_dense_replace: Count
    """Leading dense layers, counted in mlp_layer_types."""
    mlp_layer_types: tuple[str, ...]
    """"dense" or "sparse" for each layer of the trunk."""
    index_topk: Size
    index_n_heads: Size
    index_head_dim: Size
    indexer_types: tuple[str, ...]
    """"full" (own indexer) or "shared" (selection of the nearest full layer before) for each layer of the trunk."""
    index_share_for_mtp_iteration: Flag = False
    """Further MTP steps reuse the keys that the first one selected (GLM-5.2)."""
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=1, strict=True)] = 0
    """1 if the checkpoint has the multi-token-prediction layer, else 0."""
    value_head: Flag = False
    """The checkpoint has value_head.weight [1, hidden_size], a scalar beside lm_head; written only where it is so."""
    rms_norm_eps: Positive
    lora_norm_eps: Positive = 1e-6
    """Epsilon of q_a_layernorm and kv_a_layernorm: 1e-6 gives transformers' numbers, 1e-5 SGLang's and vLLM's."""
    rope_theta: Positive
    max_position_embeddings: Size
    initializer_range: Positive = 0.02
    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    dtype: str = "bfloat16"
    quantization_config: dict[str, Any] | None = None
    sharing: dict[str, Any] = {}
    """index_topk_freq, index_skip_topk_offset and index_topk_pattern as the file had them: engines that do not
    read indexer_types need them back."""
    unused: dict[str, Any] = {}
    """Keys that are known and have no effect here; saved again as they were."""
    extra: dict[str, Any] = {}
    """Keys that are not known; saved again as they were, and listed by `glm5 inspect`."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """The architecture that a parsed config.json describes."""
        try:
            return cls.model_validate(_fields(cls, raw))
        except ValidationError as err:
            raise _one_error(err) from None

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read `path`, a config.json or the folder that holds one."""
        path = Path(path)
        try:
            path = path / "config.json" if path.is_dir() else path
            text = read_bounded_text(path, SETTINGS, ConfigError) if path.is_file() else None
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"{path}: cannot be read: {getattr(err, 'strerror', None) or err}") from None
        if text is None:
            raise ConfigError(f"{path}: no such file; a checkpoint folder holds a config.json")
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as err:
            raise ConfigError(f"{path}: not valid JSON ({err})") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: got a JSON {type(raw).__name__}; allowed: an object")
        try:
            return cls.from_dict(raw)
        except ConfigError as err:
            raise ConfigError(f"{path}: {err}") from None

    def to_dict(self) -> dict[str, Any]:
        """A config.json that transformers and `from_dict` read as this same architecture."""
        others = {"rope_theta", "sharing", "unused", "extra", "quantization_config"}
        fields = self.model_dump(exclude=others if self.value_head else {*others, "value_head"})
        fixed = {key: values[0] for key, values in resolve.FIXED.items() if key not in resolve.NOT_WRITTEN}
        derived = {
            "architectures": [resolve.ARCHITECTURE],
            "model_type": resolve.MODEL_TYPE,
            "num_key_value_heads": self.num_attention_heads,
            "qk_head_dim": self.qk_head_dim,
            "head_dim": self.qk_rope_head_dim,
            "moe_layer_freq": 1,
            "mlp_layer_types": list(self.mlp_layer_types),
            "indexer_types": list(self.indexer_types),
            "eos_token_id": list(self.eos_token_id),
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
        }
        config = {**self.unused, **self.extra, **self.sharing, **fixed, **fields, **derived}
        if self.quantization_config is not None:
            config["quantization_config"] = self.quantization_config
        return {key: config[key] for key in sorted(config) if config[key] is not None or key in self.extra}

    def replace(self, **changes: Any) -> Self:
        """A checked copy with other values; per-layer lists are resolved anew when what they follow from changes."""
        raw = self.to_dict()
        for resolved, sources in _RESOLVED_FROM.items():
            if any(key in changes for key in sources):
                raw.pop(resolved, None)
        if "rope_theta" in changes:
            raw.pop("rope_parameters")
        if "num_attention_heads" in changes:
            raw.pop("num_key_value_heads")
        return type(self).from_dict({**raw, **changes})

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def num_layers_with_mtp(self) -> int:
        return self.num_hidden_layers + self.num_nextn_predict_layers

    def has_indexer(self, layer_idx: int) -> bool:
        """Whether the layer selects keys itself. The MTP layer (index num_hidden_layers) always does."""
        return layer_idx == self.num_hidden_layers or self.indexer_types[layer_idx] == "full"

    def is_moe(self, layer_idx: int) -> bool:
        """Whether the layer routes to experts. The MTP layer (index num_hidden_layers) always does."""
        return layer_idx == self.num_hidden_layers or self.mlp_layer_types[layer_idx] == "sparse"

    @property
    def has_experts(self) -> bool:
        """Whether a decoder layer routes to experts."""
        return "sparse" in self.mlp_layer_types

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.num_hidden_layers * self.n_routed_experts > MAX_EXPERTS:
            most = MAX_EXPERTS // self.num_hidden_layers
            raise refuse(
                "n_routed_experts", self.n_routed_experts, f"at most {most} in {self.num_hidden_layers} layers"
            )
        if self.qk_rope_head_dim % 2:
            raise refuse("qk_rope_head_dim", self.qk_rope_head_dim, "an even number (rotary pairs)")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise refuse("index_head_dim", self.index_head_dim, f"at least qk_rope_head_dim, {self.qk_rope_head_dim}")
        if self.n_routed_experts % self.n_group:
            raise refuse("n_group", self.n_group, f"a divisor of n_routed_experts, {self.n_routed_experts}")
        per_group = self.n_routed_experts // self.n_group
        if per_group < 2:
            raise refuse("n_group", self.n_group, f"at most {self.n_routed_experts // 2}: a group needs two experts")
        if self.topk_group > self.n_group:
            raise refuse("topk_group", self.topk_group, f"at most n_group, {self.n_group}")
        if self.num_experts_per_tok > (choice := per_group * self.topk_group):
            raise refuse("num_experts_per_tok", self.num_experts_per_tok, f"at most {choice}, the experts to pick from")
        return self


def _fields(cls: type[ModelConfig], raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` sorted into the class's fields, with everything that needs resolving resolved."""
    resolve.check_architecture(raw)
    resolve.check_fixed(raw)
    resolve.check_duplicates(raw)
    if "n_routed_experts" not in raw and "num_experts" in raw:
        raw = {**raw, "n_routed_experts": raw["num_experts"]}
    num_layers = raw.get("num_hidden_layers")
    if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
        raise refuse("num_hidden_layers", num_layers, f"an integer of 1 to {MAX_LAYERS}")
    special = {
        "mlp_layer_types": (types := resolve.mlp_layer_types(raw, num_layers)),
        "first_k_dense_replace": (*types, "sparse").index("sparse"),
        "indexer_types": resolve.indexer_types(raw, num_layers),
        "rope_theta": resolve.rope_theta(raw),
        "eos_token_id": resolve.eos_ids(raw),
        "dtype": resolve.dtype_name(raw),
        "sharing": {key: raw[key] for key in _SHARING if raw.get(key) is not None},
        "unused": {key: raw[key] for key in resolve.UNUSED if key in raw},
    }
    own = {key: raw[key] for key in cls.model_fields if key in raw and key not in special and key != "extra"}
    known = known_keys()
    return {**own, **special, "extra": {key: value for key, value in raw.items() if key not in known}}


def known_keys() -> frozenset[str]:
    """Of config.json, those that mean something to a ModelConfig or are kept unused."""
    fields = ModelConfig.model_fields.keys() - {"sharing", "unused", "extra"}
    others = {"model_type", "architectures", "rope_parameters", "torch_dtype"}
    return frozenset({*fields, *_SHARING, *others, *resolve.FIXED, *resolve.UNUSED, *resolve.DERIVED})


def _one_error(err: ValidationError) -> ConfigError:
    """pydantic's first complaint as one line of ours; all missing keys at once."""
    errors = err.errors(include_url=False)
    if missing := [str(e["loc"][0]) for e in errors if e["type"] == "missing"]:
        return ConfigError(f"{', '.join(missing)}: missing; allowed: a value as in the checkpoint's own config.json")
    if isinstance(cause := errors[0].get("ctx", {}).get("error"), ConfigError):
        return cause
    path, value, allowed = first_error(err)
    return refuse(".".join(path), value, allowed)
