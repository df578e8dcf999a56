"""The tuner: the fastest that is right wins, defaults stay unless beaten by a margin, files are what kernels read."""

import json
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from glm5.bench.kernels.case import Case
from glm5.kernels import tuned

tune = pytest.importorskip("glm5.bench.kernels.tune")
pytest.importorskip("triton")


class Cut(NamedTuple):
    rows: int
    warps: int = 4


def subject(*candidates: Cut, wrong: tuple[Cut, ...] = ()) -> "tune.Subject":
    def case(cut: Cut) -> Case:
        error = 1.0 if cut in wrong else 0.0
        return Case("op", "", lambda i: lambda: None, lambda: error, 1e-3, 1, variant=str(cut.rows))

    return tune.Subject("op", "N=1", 8, candidates, case)


def by_rows(times: dict[int, float]):
    def clock(case: Case) -> float:
        if int(case.variant) not in times:
            raise RuntimeError("too much shared memory")
        return times[int(case.variant)]

    return clock


def test_the_fastest_wins_by_a_margin(capsys):
    a, b = Cut(1), Cut(2)
    assert tune.fastest(subject(a, b), by_rows({1: 10.0, 2: 9.0})) == (b, 9.0, 10.0)
    assert tune.fastest(subject(a, b), by_rows({1: 10.0, 2: 9.9})) == (a, 10.0, 10.0)
    assert tune.fastest(subject(a, b), by_rows({1: 10.0})) == (a, 10.0, 10.0)
    assert "too much shared memory" in capsys.readouterr().out


def test_what_is_wrong_never_wins(capsys):
    a, b = Cut(1), Cut(2)
    assert tune.fastest(subject(a, b, wrong=(b,)), by_rows({1: 10.0, 2: 1.0})) == (a, 10.0, 10.0)
    assert "wrong: error 1.00e+00" in capsys.readouterr().out
    assert tune.fastest(subject(a, b, wrong=(a, b)), by_rows({1: 10.0, 2: 1.0})) is None


def test_the_file_is_what_kernels_find(tmp_path, monkeypatch):
    entries = tune.table([(subject(Cut(1)), Cut(1)), (replace(subject(Cut(1)), upto=64), Cut(3, 8))], tune.fields)
    monkeypatch.setattr(tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA X-1")
    tuned.file_of("NVIDIA X-1").write_text(tune.text(entries))
    assert json.loads((tmp_path / "NVIDIA_X_1.json").read_text()) == entries
    tuned._table.cache_clear()
    gpu = torch.device("cuda", 0)
    found = [tuned.find(Cut, "op", "N=1", tokens, gpu) for tokens in (1, 8, 9, 64, 65)]
    assert found == [Cut(1), Cut(1), Cut(3, 8), Cut(3, 8), None]
    assert tuned.find(Cut, "op", "N=2", 1, gpu) is None
    assert tuned.find(Cut, "other", "N=1", 1, gpu) is None
    assert tuned.find(Cut, "op", "N=1", 1, torch.device("cpu")) is None
    tuned._table.cache_clear()


def test_subjects_have_candidates_of_their_kernels():
    every = tune.subjects()
    assert {s.op for s in every} == {
        "sparse_mla", "index_score", "mla_queries", "router", "fp8_linear", "quantized_linear", "grouped_experts"
    }  # fmt: skip
    assert all(s.candidates and len(set(s.candidates)) == len(s.candidates) for s in every)
    assert len({(s.op, s.sizes, s.upto) for s in every}) == len(every)
    assert [s.op for s in tune.subjects("router")] == ["router"] * 9


def test_inputs_of_codes_are_shared_where_tiles_are_few():
    candidates = {s.name: s.candidates for s in tune.subjects("quantized_linear w8a8 O=")}
    assert {c.split for c in candidates["quantized_linear w8a8 O=2624 D=6144 upto=64"]} >= {1, 3, 6}
    assert max(c.split for c in candidates["quantized_linear w8a8 O=512 D=6144 upto=64"]) == 8
    assert max(c.split for c in candidates["quantized_linear w8a8 O=6144 D=512 upto=64"]) <= 2
    assert {c.cluster for c in candidates["quantized_linear w8a8 O=6144 D=512 upto=32"]} == {0, 1, 2}
    assert all(c[0].split == 1 and not c[0].cluster for c in candidates.values())


@pytest.mark.parametrize("file", sorted(tuned.FOLDER.glob("*.json")), ids=lambda file: file.stem)
def test_checked_in_files_fit_the_kernels(file):
    kinds = {s.op: type(s.candidates[0]) for s in tune.subjects()}
    for op, of_op in json.loads(file.read_text()).items():
        for some in of_op.values():
            uptos = [entry.pop("upto") for entry in some]
            assert uptos == sorted(set(uptos))
            assert all(isinstance(kinds[op](**entry), tuple) for entry in some)
