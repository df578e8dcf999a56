"""Every row of every parameter has one holder, whatever the mesh; a state in parts gives back what was put in."""

import math
from itertools import pairwise

import pytest
import torch

from glm5.common.errors import ConfigError
from glm5.config.parallel import ParallelConfig
from glm5.config.presets import preset
from glm5.config.train import StageConfig
from glm5.model.glm5 import Glm5
from glm5.train.parallel.build import put_rows, take_rows
from glm5.train.parallel.mesh import Mesh, check_stage, mesh_of
from glm5.train.parallel.row_layout import RowLayout, is_expert_sharded, split_layers
from glm5.train.sharded_state import full_state, read_parts, state_rows, weight_rows

MESHES = [
    Mesh(data=2),
    Mesh(data=3),
    Mesh(data=16),
    Mesh(data=2, context=2, expert=2),
    Mesh(2, 2, 1, 2),
    Mesh(2, 4, 2, 4),
]


@pytest.fixture(scope="module")
def shapes():
    with torch.device("meta"):
        return {name: tuple(one.shape) for name, one in Glm5(preset("tiny")).named_parameters()}


def rows_in(shape):
    return math.prod(shape[:-1]) if len(shape) > 1 else shape[0]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_row_has_one_holder(mesh, shapes):
    layout = RowLayout(mesh, preset("tiny"), shapes, mtp_depth=1)
    for name, shape in shapes.items():
        held = sorted(span for rank in range(mesh.size) for span in layout.spans(name, rank))
        assert held[0][0] == 0
        assert held[-1][1] == rows_in(shape)
        assert all(a[1] == b[0] for a, b in pairwise(held)), name
        for rank in range(mesh.size):
            assert rows_in(layout.local_shape(name, rank)) == sum(b - a for a, b in layout.spans(name, rank))


def test_experts_are_dealt_whole_and_nothing_else_is(shapes):
    dealt = {name for name in shapes if is_expert_sharded(name)}
    assert dealt == {name for name in shapes if ".mlp.experts." in name}
    assert dealt
    layout = RowLayout(Mesh(data=2, expert=2), preset("tiny"), shapes)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    experts, rows, _ = shapes[name]
    assert [layout.spans(name, rank) for rank in range(2)] == [
        [(0, experts * rows // 2)],
        [(experts * rows // 2, experts * rows)],
    ]


def test_stages_begin_where_keys_are_selected_and_leave_room_for_mtp():
    cfg = preset("tiny")
    for stages in (1, 2, 3):
        ranges = split_layers(cfg, stages, mtp_depth=1)
        assert [i for part in ranges for i in part] == list(range(cfg.num_hidden_layers))
        assert all(cfg.has_indexer(part.start) for part in ranges)
    full = split_layers(preset("glm-5"), 8, mtp_depth=3)
    assert len(full[-1]) < len(full[0])
    with pytest.raises(ConfigError, match=r"parallel\.pipeline: got 50; a stage begins with a layer that has"):
        split_layers(cfg, 50)


def test_what_does_not_divide_is_said():
    with pytest.raises(ConfigError, match="pipeline 2 x context 2 does not divide 6 processes; start a multiple of 4"):
        mesh_of(ParallelConfig(pipeline=2, context=2), 6)
    with pytest.raises(ConfigError, match=r"parallel\.expert: 3 does not divide the 2 ranks"):
        mesh_of(ParallelConfig(expert=3), 2)
    with pytest.raises(ConfigError, match="5 does not divide the 8 experts"):
        check_stage(Mesh(data=5, expert=5), preset("tiny"), stage())
    with pytest.raises(ConfigError, match="stage a: 4 sequences in step 1 cannot be distributed over 5 ranks"):
        check_stage(Mesh(data=5), preset("tiny"), stage())
    with pytest.raises(ConfigError, match="4 sequences in step 1 are 1 of some ranks and 2 of others, which pass_seq"):
        check_stage(Mesh(data=3), preset("tiny"), stage().model_copy(update={"pass_sequences": 1}))
    with pytest.raises(ConfigError, match=r"parallel\.stages: got 2; there is no pipeline"):
        mesh_of(ParallelConfig(stages=2), 2)
    assert [list(Mesh(data=3).rows(4, rank)) for rank in range(3)] == [[0, 1], [2], [3]]
    check_stage(Mesh(data=3), preset("tiny"), stage())
    check_stage(Mesh(data=2, context=3), preset("tiny"), stage())


def stage():
    return StageConfig.model_validate(
        {
            "name": "a",
            "kind": "pretrain",
            "steps": 1,
            "seq_len": 8,
            "sequences": 4,
            "data": [{"kind": "needle"}],
            "lr": 1,
        }
    )


@pytest.mark.parametrize("mesh", MESHES[2:], ids=str)
def test_parts_hold_what_was_whole(mesh, shapes):
    layout = RowLayout(mesh, preset("tiny"), shapes)
    gen = torch.Generator().manual_seed(1)
    whole = {name: torch.randn(shape, generator=gen) for name, shape in shapes.items()}
    state = {
        "model": whole | {"x.e_score_correction_bias": torch.ones(3)},
        "optimizer": {name: {"momentum": 2 * one, "step": torch.tensor(5.0)} for name, one in whole.items()},
    }
    one = read_parts(state, None)
    parts = []
    for rank in range(mesh.size):
        own = {name: layout.spans(name, rank) for name in shapes if layout.stage(name) == mesh.stage(rank)}
        weights = {name: weight_rows(one, name, spans) for name, spans in own.items()}
        for name, spans in own.items():
            assert torch.equal(weights[name], take_rows(whole[name], spans))
        optimizer = {name: state_rows(one, name, spans) for name, spans in own.items()}
        buffers = {"x.e_score_correction_bias": torch.ones(3)}
        named = {"shapes": {name: shapes[name] for name in own}, "spans": own}
        parts.append(named | {"weights": weights, "optimizer": optimizer, "buffers": buffers})
    for name, shape in shapes.items():
        again = torch.full(shape, float("nan"))
        for rank, part in enumerate(parts):
            if name in part["weights"]:
                put_rows(again, layout.spans(name, rank), part["weights"][name])
        assert torch.equal(again, whole[name])
        assert torch.equal(state_rows(parts, name, [(0, rows_in(shape))])["momentum"].view(shape), 2 * whole[name])
    with pytest.raises(KeyError, match="are not all in the state"):
        weight_rows(parts[:1], "lm_head.weight", [(0, rows_in(shapes["lm_head.weight"]))])


def test_parts_in_files_are_a_state(tmp_path, shapes):
    name = "model.norm.weight"
    for rank, span in enumerate([(0, 40), (40, 64)]):
        rows = torch.arange(*span).float()
        content = {"spans": {name: [span]}, "shapes": {name: (64,)}, "weights": {name: rows}, "buffers": {}}
        torch.save(content | {"optimizer": {name: {"exp_avg": rows}}}, tmp_path / f"{rank}.pt")
    found = full_state({"parts": ["0.pt", "1.pt"]}, tmp_path)
    assert torch.equal(found["model"][name], torch.arange(64.0))
    assert torch.equal(found["optimizer"][name]["exp_avg"], torch.arange(64.0))
