"""Runs cases: each is checked, timed and printed; optionally written as JSON."""

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from glm5.bench.command import need_gpus
from glm5.bench.kernels.case import Case, Row
from glm5.bench.kernels.machine import Machine
from glm5.common.atomic import atomic_write_json
from glm5.common.console import out

Clock = Callable[[Case], tuple[float, float, float]]
HEADER = (
    f"{'op':<44} {'us':>9} {'p20':>8} {'p80':>8} {'floor':>8} {'of floor':>8} {'TB/s':>6} {'TFLOP/s':>8} {'error':>8}"
)


def run(cases: Iterable[Case], machine: Machine, clock: Clock) -> list[Row]:
    """A row for each case. A case with a wrong result is not timed; an exception is recorded in the case's row."""
    rates = ", ".join(f"{unit} {rate / 1e12:.0f} TFLOP/s" for unit, rate in machine.flops_per_s.items())
    out(f"{machine.name}: copy {machine.bytes_per_s / 1e12:.2f} TB/s, {rates}")
    out(HEADER)
    rows: list[Row] = []
    for case in cases:
        rows.append(_row(case, machine, clock))
        out(line(rows[-1]), flush=True)
    return rows


def _row(case: Case, machine: Machine, clock: Clock) -> Row:
    error = float("nan")
    try:
        error = case.error()
        if error < case.budget:  # NaN is below no budget
            return Row(case, error, *clock(case), floor=machine.floor(case))
        return Row(case, error, failure=f"wrong: error {error:.2e}, at most {case.budget:.0e} allowed")
    except Exception as err:  # noqa: BLE001 - of many cases, one that cannot run is a row of the table
        return Row(case, error, failure=f"{type(err).__name__}: {str(err).partition(chr(10))[0]}")


def line(row: Row) -> str:
    """One row of the text table."""
    if row.failure:
        return f"{row.case.name:<44} {row.failure}"
    return (
        f"{row.case.name:<44} {row.micros:>9.2f} {row.p20:>8.2f} {row.p80:>8.2f} {row.floor:>8.2f} "
        f"{row.of_floor:>8.0%} {row.terabytes_per_s:>6.2f} {row.teraflops:>8.0f} {row.error:>8.1e}"
    )


def document(rows: Sequence[Row], machine: Machine) -> dict[str, Any]:
    """The rows as JSON: microseconds, bytes, operations, roofline time."""
    return {
        "machine": machine.name,
        "bytes_per_s": machine.bytes_per_s,
        "flops_per_s": machine.flops_per_s,
        "rows": [
            {
                "op": row.case.op,
                "shape": row.case.shape,
                "variant": row.case.variant,
                "us": row.micros,
                "p20": row.p20,
                "p80": row.p80,
                "floor_us": row.floor,
                "bytes": row.case.num_bytes,
                "flops": row.case.num_flops,
                "error": row.error,
                "failure": row.failure,
            }
            for row in rows
        ],
    }


def report(cases: Iterable[Case], only: str = "", file: Path | None = None) -> int:
    """Measure the cases whose name contains `only`, and write rows to `file` if given. Returns 1 if one failed."""
    from glm5.bench.kernels.clock import measure
    from glm5.bench.kernels.machine import measured

    machine = measured()
    rows = run([case for case in cases if only in case.name], machine, measure)
    if file:
        atomic_write_json(file, document(rows, machine))
    return int(any(row.failure for row in rows))


def main(cases: Sequence[Case], arguments: Sequence[str] | None = None) -> int:
    """The command line of a file of cases. Returns 1 if one failed."""
    parser = argparse.ArgumentParser(description="Check and time kernels at GLM-5's shapes.")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    need_gpus("a benchmark of kernels")
    return report(cases, options.only, options.json)
