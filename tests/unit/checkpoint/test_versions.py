"""Weights by a shared folder: whole or as changes, to the bit; what is damaged, missing, old or of another base is
refused by name and changes nothing."""

import json

import pytest
import torch

from glm5.checkpoint import versions
from glm5.checkpoint.changes import Change, changed
from glm5.checkpoint.update import replace
from glm5.checkpoint.versions import MARKER, WeightFolder, stage_version
from glm5.common.errors import CheckpointError
from glm5.parallel.table import Shard, Span
from tests.support.models import random_model


def sender(tmp_path, *, deltas=True):
    return WeightFolder(tmp_path / "weights", deltas=deltas)


def moved(model, share=0.01, seed=3):
    """Change some of its weights a little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            chosen = torch.rand(tensor.shape, generator=generator) < share
            tensor[chosen] += 0.25
    return model


def apply(marker, model, held):
    staged = stage_version(marker, model, held)
    replace(model, staged)
    return json.loads(marker.read_text())["version"], staged.id


def bits_of(model):
    return {name: tensor.clone().view(torch.uint8) for name, tensor in model.state_dict().items()}


def assert_equal(one, other):
    found, wanted = bits_of(one), bits_of(other)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.05, 1.0])
def test_changes_lead_from_one_tensor_to_the_other_and_take_fewer_bytes(dtype, share, seed):
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(40, 96, generator=generator).to(dtype)
    new = torch.where(torch.rand(40, 96, generator=generator) < share, old + 1, old)
    new[3, 5] = -0.0
    old[3, 5] = 0.0  # differs by a bit alone
    found = changed(old, new)
    assert found is not None
    assert changed(new, new.clone()) is None
    gaps, values = found
    sent = values.nbytes + (0 if gaps is None else gaps.nbytes)
    assert sent <= new.nbytes
    for span in (None, Span(0, 10, 30), Span(1, 24, 72)):
        held = old.clone() if span is None else old.narrow(span.dim, span.start, span.stop - span.start).clone()
        wanted = new if span is None else new.narrow(span.dim, span.start, span.stop - span.start)
        Change(gaps, values, (40, 96), span).write_into(held)
        assert torch.equal(held.view(torch.uint8), wanted.contiguous().view(torch.uint8))
    if gaps is not None:
        with pytest.raises(CheckpointError, match="do not fit"):
            Change(gaps, values, (4, 96), None)


def test_an_engine_follows_by_whole_versions_and_by_changes(tmp_path):
    theirs, ours = random_model(1), random_model(2)
    folder = sender(tmp_path)
    held = apply(folder.publish(theirs.state_dict(), 1), ours, (0, None))
    assert_equal(ours, theirs)
    whole = folder.num_bytes
    for version in (2, 7):
        marker = folder.publish(moved(theirs, seed=version).state_dict(), version)
        assert folder.num_bytes < 0.06 * whole
        held = apply(marker, ours, held)
        assert held[0] == version
        assert_equal(ours, theirs)
    assert len(list((tmp_path / "weights").iterdir())) == 2  # older ones are gone
    with pytest.raises(CheckpointError, match="version 6 was asked for after version 7"):
        folder.publish(theirs.state_dict(), 6)
    with pytest.raises(CheckpointError, match="holds version 7, and version 7 is in use"):
        stage_version(marker, ours, held)
    late = random_model(4)
    with pytest.raises(CheckpointError, match="changes to other weights"):
        stage_version(marker, late, (3, "other"))
    held = apply(folder.whole(), late, (0, None))
    assert folder.whole() == folder.whole()
    assert_equal(late, theirs)
    apply(folder.publish(moved(theirs, seed=8).state_dict(), 8), late, held)  # from the same base as the others
    assert_equal(late, theirs)
    again = folder.publish(moved(theirs, seed=9).state_dict(), 8)  # for engines that were started anew
    apply(again, random_model(5), (0, None))
    (tmp_path / "weights" / ".00000009-1f0e9a52.0123abcd.part").mkdir()  # of a sender that was killed
    (tmp_path / "weights" / "notes").mkdir()
    sender(tmp_path)
    assert [one.name for one in (tmp_path / "weights").iterdir()] == ["notes"]


def test_ranks_take_their_parts_of_changes(tmp_path):
    theirs, folder = random_model(1), sender(tmp_path)
    folder.publish(theirs.state_dict(), 1)
    before = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    marker = folder.publish(moved(theirs).state_dict(), 2)
    base = json.loads(marker.read_text())["base"]
    own = random_model(1)
    for rank in range(2):
        staged = stage_version(marker, own, (1, base), Shard(rank, 2))
        cut = [name for name, change in staged.changes.items() if change.span is not None]
        assert cut
        for name in cut:
            if name not in before:
                continue  # one of a stack of experts
            span = staged.changes[name].span
            held = before[name].narrow(span.dim, span.start, span.stop - span.start).clone()
            staged.changes[name].write_into(held)
            assert torch.equal(held, theirs.state_dict()[name].narrow(span.dim, span.start, span.stop - span.start))


@pytest.mark.parametrize("deltas", [False, True])
def test_damage_is_named_and_nothing_changes(tmp_path, deltas, rng):
    theirs, ours = random_model(1), random_model(1)
    folder = sender(tmp_path, deltas=deltas)
    held = apply(folder.publish(theirs.state_dict(), 1), ours, (0, None))
    before = random_model(1)
    marker = folder.publish(moved(theirs).state_dict(), 2)
    files = sorted(marker.parent.glob("*.safetensors"))
    content = {file: file.read_bytes() for file in [*files, marker]}

    def refused():
        with pytest.raises(CheckpointError, match=marker.parent.name):
            stage_version(marker, ours, held)
        assert_equal(ours, before)
        for file, raw in content.items():
            file.write_bytes(raw)

    marker.unlink()  # killed before the last write
    refused()
    for raw in (b"", b"{", b"[" * 100_000, content[marker].replace(b'"version":2', b'"version":"two"')):
        marker.write_bytes(raw)
        refused()
    for _ in range(4):
        file = rng.choice(files)
        raw = bytearray(content[file])
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        file.write_bytes(raw)
        refused()
    files[0].write_bytes(content[files[0]][:-1])
    refused()
    files[0].unlink()
    refused()
    said = json.loads(content[marker])
    said["files"] |= {"../model.safetensors": [1, 1]}
    marker.write_text(json.dumps(said))
    refused()
    if deltas:  # whole tensors are compared with their sums, so another base that claims to be the right one shows
        other = moved(random_model(1), seed=99)
        with pytest.raises(CheckpointError, match="wrong checksum; send all"):
            stage_version(marker, other, held)
    apply(marker, ours, held)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("deltas", [False, True])
def test_a_sender_that_ends_midway_leaves_nothing_to_read(tmp_path, monkeypatch, deltas):
    theirs, ours = random_model(1), random_model(2)
    folder = sender(tmp_path, deltas=deltas)
    held = apply(folder.publish(theirs.state_dict(), 1), ours, (0, None))
    shown = set((tmp_path / "weights").iterdir())
    moved(theirs)

    def ends(*_):
        raise OSError(28, "No space left on device")

    for number, name in enumerate(("write_file", "atomic_write", "_sum_of"), 2):
        with monkeypatch.context() as patch:
            patch.setattr(versions, name, ends)
            with pytest.raises(CheckpointError, match="cannot be written there: No space left"):
                folder.publish(theirs.state_dict(), number)
        assert set((tmp_path / "weights").iterdir()) == shown
    marker = folder.publish(theirs.state_dict(), 9)
    assert json.loads(marker.read_text())["base"] is None  # what engines have is not known any more
    apply(marker, ours, held)
    assert_equal(ours, theirs)
    assert (marker.parent / MARKER).is_file()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    theirs, ours, folder = random_model(1), random_model(1), sender(tmp_path)
    held = apply(folder.publish(theirs.state_dict(), 1), ours, (0, None))
    with torch.no_grad():
        theirs.lm_head.weight[0, 0] = 1e30
    marker = folder.publish(theirs.state_dict(), 2)
    half = random_model(1).to(torch.float16)
    with pytest.raises(CheckpointError, match=r"lm_head.weight would hold NaN or infinity"):
        stage_version(marker, half, held)
