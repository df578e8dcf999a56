"""The table of kernel timings: what is wrong is not timed, floors and rates are those of the case."""

import json

import pytest

from glm5.bench.kernels.case import Case
from glm5.bench.kernels.machine import Machine
from glm5.bench.kernels.table import document, line, run

MACHINE = Machine("card", 2e12, {"fp8": 1e15, "bf16": 5e14})


def case(error: float = 0.0, **changed) -> Case:
    given = {"op": "op", "shape": "M=1", "num_bytes": 4_000_000, "num_flops": 10**9, "budget": 1e-3} | changed
    return Case(make=lambda i: lambda: None, error=lambda: error, **given)


def clock(_case: Case) -> tuple[float, float, float]:
    return 4.0, 3.0, 5.0


def test_floor_is_the_larger_of_bytes_and_operations(capsys):
    (row,) = run([case()], MACHINE, clock)
    assert (row.floor, row.of_floor, row.terabytes_per_s, row.teraflops) == pytest.approx((2.0, 0.5, 1.0, 250.0))
    (row,) = run([case(num_flops=10**10, unit="bf16")], MACHINE, clock)
    assert row.floor == pytest.approx(20.0)
    assert line(row) in capsys.readouterr().out


@pytest.mark.parametrize("error", [1e-3, 1.0, float("nan")])
def test_what_is_wrong_is_not_timed(error, capsys):
    def never(_case):
        raise AssertionError("timed")

    (row,) = run([case(error)], MACHINE, never)
    assert "wrong" in row.failure
    assert "wrong" in capsys.readouterr().out


def test_what_raises_is_a_row(capsys):
    def out_of_memory(_case):
        raise RuntimeError("no memory\nat all")

    rows = run([case(), case(1.0)], MACHINE, out_of_memory)
    assert [row.failure.partition(":")[0] for row in rows] == ["RuntimeError", "wrong"]
    assert "RuntimeError: no memory\n" in capsys.readouterr().out


def test_document_is_json():
    rows = run([case(), case(1.0)], MACHINE, clock)
    read = json.loads(json.dumps(document(rows, MACHINE)))
    assert next(row["us"] for row in read["rows"]) == 4.0
    assert [bool(row["failure"]) for row in read["rows"]] == [False, True]
