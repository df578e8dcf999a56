"""`python -m glm5.bench.optimizers RECIPE`: loss curves of Muon Split, Muon and AdamW at equal tokens, over seeds.

First each optimizer is trained with each of its rates, for fewer steps and with the first seed; the rate of the lowest
held-out loss is used from then on. Then every optimizer is trained with every seed, several runs at a time. Last each
runs some steps alone to measure the time of a step. Writes a table, optimizers.json and optimizers.svg. Results of
finished runs are kept, so an interrupted command continues where it stopped.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path

from glm5.bench.command import command
from glm5.bench.optimizers.report import lines, picture, table
from glm5.bench.optimizers.runs import WAYS, Done, Given, Plan, found, run
from glm5.common.atomic import atomic_write
from glm5.common.console import out

MUON_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
ADAMW_RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="glm5.bench.optimizers", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/optimizers"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--muon-rates", type=float, nargs="+", default=list(MUON_RATES))
    parser.add_argument("--adamw-rates", type=float, nargs="+", default=list(ADAMW_RATES))
    parser.add_argument("--search-steps", type=int, default=100)
    parser.add_argument("--timed-steps", type=int, default=40)
    parser.add_argument("--processes", type=int, default=min(9, os.cpu_count() or 1), help="at the same time")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the recipe")
    args = parser.parse_args(argv)

    args.out.mkdir(parents=True, exist_ok=True)
    given = Given(args.recipe, tuple(args.set), args.out)
    steps = given.read().stage[0].steps
    given.prepare()
    rates = {way: args.adamw_rates if way == "AdamW" else args.muon_rates for way in WAYS}
    context = multiprocessing.get_context("spawn")  # a process that has used a GPU must not be forked
    with ProcessPoolExecutor(args.processes, mp_context=context) as pool:
        tried = [Plan(way, rate, args.seeds[0], args.search_steps) for way in WAYS for rate in rates[way]]
        searched = list(_results(pool, given, tried))
        best = {way: _best(way, searched) for way in WAYS}
        runs = [Plan(way, best[way], seed, steps) for seed in args.seeds for way in WAYS]
        done = list(_results(pool, given, runs))
        alone = [Plan(way, best[way], args.seeds[0], args.timed_steps, alone=True) for way in WAYS]
        timed = [one for plan in alone for one in _results(pool, given, [plan])]
    summary = lines(searched, done, timed)
    out(table(summary))
    document = {"lines": [asdict(one) for one in summary], "runs": [asdict(one) for one in (*searched, *done, *timed)]}
    with atomic_write(args.out / "optimizers.json") as handle:
        handle.write(json.dumps(document) + "\n")
    with atomic_write(args.out / "optimizers.svg") as handle:
        handle.write(picture(done) + "\n")
    return 0


def _results(pool: Executor, given: Given, plans: Sequence[Plan]) -> Iterator[Done]:
    """Existing results first, then new ones as they finish. Ends at the first failure; earlier results are on disk."""
    existing = {plan: found(given, plan) for plan in plans}
    yield from (done for done in existing.values() if done is not None)
    for future in as_completed([pool.submit(run, given, plan) for plan, done in existing.items() if done is None]):
        done = future.result()
        out(f"{done.plan.name}: held-out loss {done.last:.4f}, {done.seconds * 1e3:.0f} ms a step")
        yield done


def _best(way: str, searched: Sequence[Done]) -> float:
    return min((one for one in searched if one.plan.way == way), key=lambda one: one.last).plan.rate


if __name__ == "__main__":
    sys.exit(command(main))
