"""Settings of a training step: optimizer and losses, with the published settings as defaults.

Parts of a training recipe (an `[optimizer]`, a `[losses]`, a stage's `window` table). Sources: GLM-5 report, appendix
A; where it is silent (the optimizer of the rest, clipping), the usual choice, said beside the field.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

CoefficientSet = Literal["quintic", "quintic-5", "polar-express", "two-phase"]
Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of a recipe's parts: frozen, nothing unknown, documented by the strings under the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class OptimizerConfig(Section):
    """Muon for matrices, AdamW for the rest (embedding, lm_head, norms, biases)."""

    kind: Literal["muon", "adamw"] = "muon"
    """adamw: every tensor is AdamW's, for comparisons."""
    split: bool = True
    """Muon Split: W_UQ, W_UK and W_UV are orthogonalised head by head."""
    split_rope: bool = False
    """The rotated rows of a query head are a matrix of their own."""
    muon_lm_head: bool = False
    """lm_head is Muon's too. The report does not exclude it; the usual choice is AdamW."""
    coefficients: CoefficientSet = "quintic"
    """Newton-Schulz polynomials. quintic: five steps of one polynomial, as published."""
    momentum: Beta = 0.95
    momentum_dtype: Literal["float32", "bfloat16"] | None = None
    """Element type of Muon's momentum. Default: that of the weights."""
    update_rms: Positive = 0.2
    """Root mean square of an update at learning rate 1; 0.2 is AdamW's usual, so its rates carry over."""
    weight_decay: NotNegative = 0.1
    """Of matrices, embedding and lm_head; norms and biases have none."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's; not published."""
    eps: Positive = 1e-8
    matrix_lr: Positive = 1.0
    """Rate of Muon's tensors, relative to the schedule's; with kind adamw, of what Muon's would be."""
    embedding_lr: Positive = 1.0
    """Rate of the embedding, relative to the schedule's."""
    indexer_lr: Positive = 1.0
    """Rate of the indexers, relative to the schedule's."""
    max_grad_norm: Positive | None = 1.0
    """Gradients are scaled down to this norm, those of the indexers apart from the rest. None: never; not published."""


class LossConfig(Section):
    """What is added to the cross-entropy of the next token."""

    mtp_depth: Annotated[int, Field(ge=0, le=8)] = 3
    """How often the MTP layer is applied in a row, with the same weights. 0: not trained."""
    mtp_weight: NotNegative = 0.3
    """Of the mean over the depths. The report: 0.3, late in pre-training 0.1."""
    balance_step: NotNegative = 1e-3
    """How far a router's selection bias moves in a step towards an even load. 0: frozen."""
    balance_weight: NotNegative = 1e-4
    """Of the sequence-level auxiliary loss on the load of experts. 0: none."""
    index_weight: NotNegative = 1.0
    """Of the indexers' KL. Their gradients meet no others, so this matters for clipping alone."""
    chunk: Annotated[int, Field(ge=1, le=2**31)] = 4096
    """Tokens whose logits exist at a time."""


class WindowConfig(Section):
    """Sliding-window attention, for comparison (GLM-5 report, 2.1.2)."""

    size: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """Keys that a windowed layer reads: the last ones, the query's own included. The report: 4096."""
    pattern: Annotated[str, Field(pattern=r"^[SF]+$")] = "SF"
    """By layer, repeated from the first: S reads a window, F every key. SF alternates; S leaves no full layer."""

    def pattern_of(self, layer_idx: int) -> str:
        return self.pattern[layer_idx % len(self.pattern)]


class LoraConfig(Section):
    """Adapters that learn beside frozen weights."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Columns of A and B."""
    alpha: Positive = 32.0
    """What an adapter adds is multiplied by alpha / rank."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
    """Linear layers by the last part of their name: those of attention, and gate_proj, up_proj and down_proj of dense
    MLPs and shared experts, eh_proj of the MTP layer."""

    @field_validator("targets")
    @classmethod
    def _learn(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        """No adapters that no gradient would reach: indexers learn from a loss of their own, which lora has not."""
        for target in targets:
            if target in ("wq_b", "wk", "weights_proj", "kv_b_proj"):
                what = (
                    "attention reads its weight alone" if target == "kv_b_proj" else "the indexers do not learn in lora"
                )
                raise ValueError(
                    f"an adapter of {target} would learn nothing ({what}); leave it out: q_a_proj, q_b_proj, "
                    "kv_a_proj_with_mqa, o_proj, gate_proj, up_proj and down_proj learn"
                )
        return targets
