"""A row's results are its own: bit for bit the same wherever it stands in its pass, whoever stands beside it.

Sequences are computed one after the other, then in random arrangements (tests/support/arranged_rows.py).
"""

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.config.presets import preset
from glm5.engine.runner.forward.passes import Passes
from glm5.kernels.invariant import PASS_ROWS
from glm5.model.lowering import use_invariant
from tests.support.arranged_rows import in_turn, make_ids, mixed
from tests.support.models import random_model

# Widths that no vector divides; rows of 16 bytes, as kernels/invariant.py asks for.
ODD = {
    "hidden_size": 36,
    "num_attention_heads": 3,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "index_n_heads": 5,
    "index_head_dim": 12,
    "index_topk": 50,
    "moe_intermediate_size": 20,
    "intermediate_size": 44,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "vocab_size": 67,
}
CONFIGS = {
    "tiny": preset("tiny"),
    "odd widths": preset("tiny").replace(**ODD),
    "one head, one key": preset("tiny").replace(num_attention_heads=1, index_n_heads=1, index_topk=1, v_head_dim=20),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CONFIGS),
        ("odd widths", torch.bfloat16),
        *(pytest.param(name, torch.bfloat16, marks=pytest.mark.long) for name in ("tiny", "one head, one key")),
    ],
    ids=str,
)
def test_a_row_is_the_same_in_any_pass(name, dtype, seed, rng):
    model = random_model(seed, CONFIGS[name], dtype)
    use_invariant(model)
    ids = make_ids(model.cfg, rng)
    passes = Passes(model, PASS_ROWS)
    want = in_turn(passes, ids, rng)
    for _ in range(2):
        assert mixed(passes, ids, rng).num_unlike(want) == 0


@pytest.mark.parametrize("layout", ["fp8_key", "fp8"])
def test_a_row_is_the_same_over_fp8(layout, seed, rng):
    model = random_model(seed, CONFIGS["odd widths"])
    use_invariant(model)
    ids = make_ids(model.cfg, rng)
    passes = Passes(model, PASS_ROWS)
    want = in_turn(passes, ids, rng, layout=layout)
    assert mixed(passes, ids, rng, layout=layout).num_unlike(want) == 0
    assert in_turn(passes, ids, rng).num_unlike(want) > 0  # the control: another layout, other rows


@pytest.mark.slow  # where threads have no core each, minutes
@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_row_is_the_same_where_threads_share_an_operation(num_threads, seed, rng):
    """At one number of threads: with another, MKL divides some products otherwise. Or it is refused."""
    cfg = CONFIGS["odd widths"].replace(hidden_size=260, moe_intermediate_size=132, intermediate_size=1100)
    model = random_model(seed, cfg)
    ids, passes = make_ids(cfg, rng), Passes(model, PASS_ROWS)
    torch.set_num_threads(num_threads)
    try:
        try:
            use_invariant(model)
        except ConfigError:
            if num_threads > 2:
                return
            raise
        assert mixed(passes, ids, rng).num_unlike(in_turn(passes, ids, rng)) == 0
    finally:
        torch.set_num_threads(1)


def test_a_processor_whose_products_treat_rows_unlike_is_refused(monkeypatch):
    def product(x, weight):
        return torch.cat([x[:16] @ weight.mT, (x[16:].double() @ weight.double().mT).float()])

    model = random_model(0)
    monkeypatch.setattr("glm5.kernels.invariant.F.linear", product)
    with pytest.raises(
        ConfigError, match=r"with num_threads \d: its products .* num_threads 1 or 2, or MKL_CBWR=AVX2,STRICT"
    ):
        use_invariant(model)


@pytest.mark.parametrize("left_out", ["passes", "model", "view"])
def test_without_any_part_rows_differ(left_out, seed, rng):
    """The control: passes of other sizes, the model's usual implementations, the view's usual ones (which attend to all
    keys at once where a selection would take them all)."""
    model = random_model(seed, CONFIGS["odd widths"].replace(index_topk=1024))
    if left_out != "model":
        use_invariant(model)
    ids = make_ids(model.cfg, rng)
    passes, is_invariant = Passes(model, None if left_out == "passes" else PASS_ROWS), left_out != "view"
    want = in_turn(passes, ids, rng, invariant=is_invariant)
    num_unlike = mixed(passes, ids, rng, invariant=is_invariant).num_unlike(want)
    print(f"without {left_out}: {num_unlike} of {len(want.found)} rows differ")
    assert num_unlike > 0


def test_widths_that_rows_cannot_begin_aligned_with_are_refused():
    model = random_model(0, preset("tiny").replace(q_lora_rank=30, v_head_dim=18))
    with pytest.raises(ConfigError, match=r"multiples of 4, this model has q_lora_rank 30, v_head_dim 18; run without"):
        use_invariant(model)
