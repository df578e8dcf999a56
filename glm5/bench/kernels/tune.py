"""Finds the fastest parameters of each kernel at GLM-5's shapes on this GPU, for `glm5/kernels/tuned`.

A subject is an op at a size and a number of tokens. Its candidates are timed, and the fastest with a correct result is
written to the file. The first candidate is the op's default; another one replaces it only if it is 2 % faster.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from glm5.bench.kernels.attention import TOP_K, attention_case, selection_case
from glm5.bench.kernels.case import Case
from glm5.bench.kernels.clock import measure
from glm5.bench.kernels.elementwise import router_case
from glm5.bench.kernels.experts import experts_case
from glm5.bench.kernels.linear import linear_case
from glm5.bench.kernels.preparation import queries_case
from glm5.bench.kernels.quantized import LINEAR_TOKENS, W8A8
from glm5.bench.kernels.quantized import linear_case as quantized_linear_case
from glm5.bench.kernels.shapes import (
    ACTIVE,
    EXPERT_INNER,
    EXPERTS,
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    KV_LORA,
    QK_HEAD,
    RANKS,
    ROPE,
    linears,
    quantized_linears,
)
from glm5.common.console import out
from glm5.kernels import tuned

BETTER = 0.98  # of the default's time, at most
_LAUNCHES, _REPLAYS = 60, 5
_KINDS = (("bf16", ""), ("fp8", " fp8"))
MAX_JOBS = 12
MAX_TOKENS = 8192  # of a step
_MAX_SPLIT = 8
_FULL = 96  # programs that nearly fill a GPU
# Candidates of quantized_linear in int8 by maximum number of tokens: (block_o, block_t, block_k, stages, warps,
# programs). block_t 0: the number of tokens. `programs`: how many split-K shall give; 0: no split-K.
_CODED_CUTS = (
    (16, (
        (16, 0, 256, 6, 2, 0), (16, 0, 512, 4, 4, 0), (32, 0, 256, 4, 4, 0), (64, 0, 128, 6, 4, 0),
        (16, 0, 256, 4, 2, 264), (32, 0, 256, 4, 4, 132), (32, 0, 256, 4, 4, 264), (64, 0, 128, 6, 4, 132),
        (64, 0, 128, 4, 4, 264), (64, 0, 256, 4, 4, 132), (64, 0, 256, 4, 4, 264),
    )),
    (64, (
        (16, 0, 256, 4, 4, 0), (32, 0, 256, 4, 4, 0), (64, 0, 128, 6, 4, 0), (64, 0, 256, 4, 4, 0),
        (32, 0, 256, 4, 4, 264), (64, 0, 128, 6, 4, 132), (64, 0, 128, 4, 4, 264), (64, 0, 256, 3, 4, 132),
        (64, 0, 256, 3, 4, 264), (64, 0, 128, 4, 8, 264), (128, 0, 128, 4, 8, 132),
    )),
    (128, (
        (32, 64, 256, 4, 4, 0), (32, 128, 256, 3, 4, 0), (64, 64, 256, 4, 4, 0), (64, 128, 128, 6, 4, 0),
        (64, 128, 256, 3, 4, 0), (32, 128, 256, 3, 4, 264), (64, 64, 128, 4, 4, 264), (64, 128, 128, 6, 8, 132),
        (64, 128, 128, 4, 8, 264), (128, 64, 128, 4, 8, 132), (128, 128, 128, 4, 8, 132),
    )),
    (MAX_TOKENS, (
        (64, 64, 128, 6, 4, 0), (64, 128, 128, 4, 4, 0), (128, 64, 128, 4, 4, 0), (128, 128, 128, 4, 4, 0),
        (128, 128, 128, 4, 8, 0), (128, 128, 256, 3, 8, 0), (128, 256, 128, 3, 8, 0), (128, 256, 128, 4, 8, 0),
        (256, 128, 128, 3, 8, 0), (64, 128, 128, 4, 8, 264), (128, 128, 128, 4, 8, 132),
    )),
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """An entry of the file, its candidates (the default first) and the case that measures one."""

    op: str
    sizes: str
    upto: int
    candidates: tuple[Any, ...]
    case: Callable[[Any], Case]

    @property
    def name(self) -> str:
        return f"{self.op} {self.sizes} upto={self.upto}"


def _experts() -> Iterator[Subject]:
    from glm5.kernels.grouped_experts import triton as op

    Tiling = partial(op.Tiling)
    for ranks in RANKS:
        inner = EXPERT_INNER // ranks
        for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192):
            some = [op.tiling_for(tokens, tokens * ACTIVE, EXPERTS, inner)]
            if tokens <= 4:
                some += [Tiling("vector", *cut) for cut in ((2, 4, 8), (4, 2, 8), (2, 4, 8, 4, 2), (2, 2, 8))]
            if 2 <= tokens <= 32:
                some += [Tiling("pairs", 64, 4, 64, 4, 1, *cut) for cut in ((8, 6, 3), (8, 4, 3), (4, 6, 3))]
            if 32 <= tokens <= 512:
                cuts = ((8, 5, 3, 16), (8, 4, 3, 16), (8, 3, 3, 32))
                some += [Tiling("tiles", 128, 8, 128, 8, 1, *cut) for cut in cuts]
            if tokens >= 256:
                cuts = ((16, 4, 3, 128, 64), (16, 4, 3, 64, 64))
                some += [Tiling("rows", 128, 8, 64, 4, 1, *cut) for cut in cuts]

            def case(tiling: Any, tokens: int = tokens, ranks: int = ranks) -> Case:
                return experts_case(tokens, ranks, lambda *given: op.grouped_experts(*given, tiling=tiling))

            yield Subject("grouped_experts", op.sizes_of((EXPERTS, HIDDEN, inner)), tokens, _distinct(some), case)


def _linears() -> Iterator[Subject]:
    from glm5.kernels.fp8_linear import triton as op

    weights = {f"O={w.rows} D={w.cols}": (w, ranks) for ranks in reversed(RANKS) for w in linears(ranks)}
    for sizes, (weight, ranks) in weights.items():
        for tokens in (1, 8, 16, 32, 64, 128):
            default = op.tiling_for(tokens, weight.rows, weight.cols, quantized=tokens > op.FEW_ROWS)
            if tokens == 1:
                some = [op.Tiling(*cut) for cut in ((4, 1, 1), (4, 1, 2), (8, 1, 1), (2, 1, 1))]
            else:
                splits = (max(1, round(default.split * share)) for share in (0.5, 1.5, 2))
                some = [default._replace(split=split) for split in splits if split <= weight.cols // 512]
                some.append(default._replace(stages=10 - default.stages))

            def case(tiling: Any, weight: Any = weight, tokens: int = tokens, ranks: int = ranks) -> Case:
                return linear_case(weight, tokens, ranks, lambda x, w: op.fp8_linear(x, w, None, tiling))

            yield Subject("fp8_linear", sizes, tokens, _distinct([default, *some]), case)


def _quantized_linears() -> Iterator[Subject]:
    from glm5.kernels.quantized_linear import cuda, triton
    from glm5.kernels.quantized_linear import tiling as op

    weights = {op.sizes_of(W8A8, w.rows, w.cols): (w, ranks) for ranks in RANKS for w in quantized_linears(ranks)}
    for sizes, (weight, ranks) in weights.items():
        for tokens in LINEAR_TOKENS:
            some = [op.tiling_for(tokens, weight.rows)]
            cuts = next(cuts for max_tokens, cuts in _CODED_CUTS if tokens <= max_tokens)
            for block_o, block_t, block_k, stages, warps, programs in cuts:
                columns = block_t or max(8, 1 << (tokens - 1).bit_length())
                tiles = -(-weight.rows // block_o) * -(-tokens // columns)
                split = max(1, min(programs // tiles, weight.cols // (2 * block_k), _MAX_SPLIT))
                some.append(op.Tiling(block_o, columns, block_k, 1, stages, warps, split))

            # The kernel for up to 16 tokens has no clusters.
            clusters = (1,) if tokens <= cuda.FEW_TOKENS else (1, 2, 4, 8) if tokens <= cuda.MAX_TOKENS else ()
            some += [op.Tiling(cluster=cluster) for cluster in clusters if cluster <= weight.cols // 256]

            def case(tiling: Any, weight: Any = weight, tokens: int = tokens, ranks: int = ranks) -> Case:
                run = cuda.quantized_linear if tiling.cluster else triton.quantized_linear
                return quantized_linear_case(W8A8, weight, tokens, ranks, lambda x, w: run(x, w, tiling))

            # The entry of the most tokens applies to all larger steps.
            upto = MAX_TOKENS if tokens == max(LINEAR_TOKENS) else tokens
            yield Subject("quantized_linear", sizes, upto, _distinct(some), case)


def _router() -> Iterator[Subject]:
    from glm5.kernels.router import triton as op

    few = ((8, 32, 128, 12, 2), (8, 32, 128, 24, 2), (8, 16, 128, 12, 1), (8, 32, 256, 12, 2), (8, 32, 128, 16, 2, 3))
    some = ((16, 64, 128, 6), (16, 32, 128, 12, 2), (16, 64, 128, 12), (32, 64, 128, 4), (16, 32, 128, 6, 2))
    tiles = ((64, 128, 128, 8), (64, 64, 128, 4), (32, 64, 128, 4), (128, 64, 128, 8))
    # From decoding to prompts, whose rows may be sharded over eight ranks.
    for tokens in (1, 8, 32, 64, 128, 256, 512, 1024, 2048):
        many = tuple(
            (block_t, block_e, block_d, split, warps)
            for block_t, block_e, block_d, warps in tiles
            for split in (1, 2, 4, 8, 12)
            if _FULL <= -(-tokens // block_t) * (EXPERTS // block_e) * split <= 3 * _FULL
        )
        cuts = (few if tokens <= 8 else ()) + (some if 8 <= tokens <= 256 else ()) + (many if tokens >= 64 else ())
        candidates = _distinct([op.tiling_for(tokens), *(op.Tiling(*cut) for cut in cuts)])

        def case(tiling: Any, tokens: int = tokens) -> Case:
            from glm5.bench.kernels.elementwise import OPTIONS

            return router_case(tokens, lambda x, w, b: op.router(x, w, b, **OPTIONS, tiling=tiling))

        yield Subject("router", f"E={EXPERTS} D={HIDDEN}", tokens, candidates, case)


def _attention() -> Iterator[Subject]:
    from glm5.kernels.sparse_mla import triton as op

    plain = ((1, 16, 64, 4, 3, 2), (1, 16, 32, 4, 4, 2), (1, 16, 32, 4, 4, 3, 168), (1, 16, 64, 4, 2, 2))
    narrow = ((1, 16, 32, 4, 4, 2), (1, 16, 32, 4, 3, 2), (1, 16, 32, 4, 3, 3, 168), (1, 16, 16, 4, 3, 2))
    for ranks in RANKS:
        heads = HEADS // ranks
        for kind, suffix in _KINDS:
            cuts = narrow if suffix else plain
            for tokens in (1, 2, 4, 8, 16, 32, 64, 128):

                def decode(tiling: Any, tokens: int = tokens, kind: str = kind, heads: int = heads) -> Case:
                    return attention_case(kind, heads, tokens, 1, 2 * TOP_K, selected=True, tiling=tiling)

                candidates = tuple(op.Tiling(*cut) for cut in cuts)
                yield Subject("sparse_mla", f"H={heads} C={KV_LORA}{suffix}", tokens, candidates, decode)


def _scores() -> Iterator[Subject]:
    from glm5.kernels.index_score import triton as op

    sizes = f"J={INDEX_HEADS} I={INDEX_DIM}"
    for kind, suffix in _KINDS:
        for tokens in (1, 8, 32, 64, 128):
            cuts = ((64, 1, 4, 2, 2112), (64, 1, 4, 3, 1056), (64, 1, 2, 3, 1056), (64, 1, 2, 2, 2112))

            def decode(tiling: Any, tokens: int = tokens, kind: str = kind) -> Case:
                return selection_case(kind, tokens, 1, 2304, tiling)

            yield Subject("index_score", sizes + suffix, tokens, tuple(op.Tiling(*cut) for cut in cuts), decode)
        cuts = ((64, 8, 4, 2, 528), (64, 8, 4, 2, 792), (64, 8, 4, 3, 528), (64, 8, 4, 2, 1056))

        def prompt(tiling: Any, kind: str = kind) -> Case:
            return selection_case(kind, 1, 2048, 4096, tiling)

        yield Subject("index_score", f"{sizes}{suffix} crowded", 8192, tuple(op.Tiling(*cut) for cut in cuts), prompt)


def _queries() -> Iterator[Subject]:
    from glm5.kernels.mla_queries import triton as op

    for ranks in RANKS:
        heads = HEADS // ranks
        for tokens in (1, 8, 32, 64, 128, 512, 2048):
            rows = op.tiling_for(tokens).tokens
            cuts = [(rows, 64), (rows, 32), (rows, 64, 8)] + [(64, 0), (64, 64), (128, 128, 8)] * (tokens > 64)

            def case(tiling: Any, tokens: int = tokens, heads: int = heads) -> Case:
                return queries_case(heads, tokens, tiling)

            candidates = _distinct([op.Tiling(*cut) for cut in cuts])
            yield Subject("mla_queries", f"H={heads} N={QK_HEAD - ROPE} C={KV_LORA}", tokens, candidates, case)


def _distinct(candidates: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(candidates))


def subjects(only: str = "") -> list[Subject]:
    """All subjects whose name contains `only`; those of one size in order of tokens."""
    every = (_attention, _scores, _queries, _router, _linears, _quantized_linears, _experts)
    return [subject for some in every for subject in some() if only in subject.name]


def fastest(subject: Subject, clock: Callable[[Case], float]) -> tuple[Any, float, float] | None:
    """(candidate, its microseconds, the default's). The default wins unless another is faster by the margin `BETTER`.
    None if all candidates fail."""
    times: list[tuple[float, float, Any]] = []
    for number, candidate in enumerate(subject.candidates):
        try:
            micros = clock(subject.case(candidate))
        except Exception as err:  # noqa: BLE001 - one that does not fit the GPU is no candidate
            out(f"{subject.name} {tuple(candidate)}: {type(err).__name__}: {str(err).partition(chr(10))[0][:100]}")
            continue
        times.append((micros * (BETTER if number == 0 else 1.0), micros, candidate))
    default = next((micros for _, micros, candidate in times if candidate == subject.candidates[0]), float("nan"))
    for _, micros, candidate in sorted(times, key=lambda entry: entry[0]):
        case = subject.case(candidate)
        error = case.error()
        if error < case.budget:
            return candidate, micros, default
        out(f"{subject.name} {tuple(candidate)}: wrong: error {error:.2e}, at most {case.budget:.0e} allowed")
    return None


def table(chosen: Sequence[tuple[Subject, Any]], defaults: Callable[[Any], dict[str, Any]]) -> tuned.Table:
    """The content of the file."""
    entries: tuned.Table = {}
    for subject, candidate in chosen:
        of_sizes = entries.setdefault(subject.op, {}).setdefault(subject.sizes, [])
        of_sizes.append({"upto": subject.upto} | defaults(candidate))
    return entries


def fields(candidate: Any) -> dict[str, Any]:
    """A tiling's values that differ from its type's defaults."""
    return {name: value for name, value in candidate._asdict().items() if candidate._field_defaults.get(name) != value}


def text(entries: tuned.Table) -> str:
    """JSON with one entry per line."""
    ops = []
    for op, of_op in entries.items():
        sizes = []
        for name, some in of_op.items():
            lines = ",\n".join(f"   {json.dumps(entry)}" for entry in some)
            sizes.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
        ops.append(f" {json.dumps(op)}: {{\n" + ",\n".join(sizes) + "\n }")
    return "{\n" + ",\n".join(ops) + "\n}\n"


def _compile(share: int, shares: int, only: str) -> None:
    """Run every candidate of a share of the subjects once, which compiles it into Triton's cache."""
    for subject in subjects(only)[share::shares]:
        for candidate in subject.candidates:
            try:
                subject.case(candidate).make(0)()
            except Exception:  # noqa: BLE001 - reported when it is timed
                continue
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def tune(only: str = "", file: Path | None = None) -> Path:
    """Measure all subjects on the current GPU and write the fastest. Other entries of an existing file are kept."""
    wanted = subjects(only)
    jobs = max(1, min(MAX_JOBS, (os.cpu_count() or 2) - 2))
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(_compile, shares=jobs, only=only), range(jobs)))
    chosen: list[tuple[Subject, Any]] = []
    for subject in wanted:
        best = fastest(subject, lambda case: measure(case, _LAUNCHES, _REPLAYS)[0])
        if best is not None:
            candidate, micros, default = best
            chosen.append((subject, candidate))
            out(f"{subject.name:<56} {micros:>9.2f} us, default {default:>9.2f}  {tuple(candidate)}", flush=True)
    file = file or tuned.file_of(torch.cuda.get_device_name())
    entries: tuned.Table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    for op, of_op in table(chosen, fields).items():
        entries.setdefault(op, {}).update(of_op)
    file.write_text(text(entries), encoding="utf-8")
    return file
