"""`glm5 bench throughput` and `latency`: this engine, alone or compared with another. Tables go to standard output."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5.cli.cached import kernels_in
from glm5.cli.folders import check_parent
from glm5.common.atomic import atomic_write_json
from glm5.common.console import out
from glm5.config.bench import RECIPES, BenchConfig, LatencyConfig
from glm5.config.presets import preset

if TYPE_CHECKING:
    from glm5.bench.peer import Peer
    from glm5.engine.llm import LLM


def run(command: str, settings: BenchConfig) -> int:
    """Run the benchmark and print its table."""
    check_parent("--json", settings.json_)
    if isinstance(settings, LatencyConfig) and settings.preset is not None:
        return run_steps(settings)
    assert settings.model is not None, "checked by the settings"
    if settings.against is not None:
        from glm5.bench.peer import check

        check()
    from glm5.bench.measure import measure
    from glm5.bench.report import document, table
    from glm5.engine.llm import LLM

    model = {"dtype": settings.dtype, "device": settings.device}
    with LLM(settings.model, **model, **settings.engine_config().model_dump()) as llm:
        _show(settings.model, llm)
        measured = measure(settings, llm, _peer(settings, llm))
        found = document(command, settings, measured, dict(llm.table))
    out("\n" + table(found))
    if settings.json_ is not None:
        atomic_write_json(settings.json_, found)
    return 0


def run_steps(settings: LatencyConfig) -> int:
    """Time the steps of a preset, and the start. The number of drafts is fixed, whatever the load."""
    from glm5.bench.latency.measure import fitted, measure
    from glm5.bench.latency.report import table
    from glm5.bench.report import about
    from glm5.bench.steps.case import with_codes
    from glm5.checkpoint.init import write_weightless
    from glm5.engine.llm import LLM

    name = settings.preset
    assert name is not None
    cfg = preset(name, settings.num_hidden_layers)
    settings = fitted(settings, settings.max_model_len or cfg.max_position_embeddings)
    if settings.weights in RECIPES:
        cfg = with_codes(cfg, settings.weights)
    engine: dict[str, Any] = settings.engine_config().model_dump()
    engine |= {"adaptive_speculation": False, "enable_return_routed_experts": cfg.has_experts}
    engine["max_num_seqs"] = max(settings.max_num_seqs, *settings.batch)
    with tempfile.TemporaryDirectory() as folder, _kernel_cache(empty=settings.empty_kernel_cache):
        path = write_weightless(cfg, Path(folder) / name, fp8=settings.weights != "bfloat16")
        with LLM(path, dtype=settings.dtype, device=settings.device, **engine) as llm:
            _show(f"{name}, {cfg.num_hidden_layers} layers, random weights", llm)
            known = about("latency", settings) | {"layers": cfg.num_hidden_layers, "engine": dict(llm.table)}

            def keep(found: dict[str, Any], **more: bool) -> None:
                if settings.json_ is not None:
                    atomic_write_json(settings.json_, known | found | more)

            found = measure(settings, llm, lambda line: out(line, flush=True), partial(keep, partial=True))
    keep(found)
    out("\n" + table(found))
    return 0


@contextmanager
def _kernel_cache(*, empty: bool) -> Iterator[None]:
    """With `empty`, a temporary kernel cache; else the usual one."""
    if not empty:
        yield
        return
    with tempfile.TemporaryDirectory() as folder, kernels_in(folder):
        yield


def _show(model: str, llm: "LLM") -> None:
    width = max(len(name) for name, _ in llm.table)
    for name, choice in (("model", model), *llm.table):
        out(f"{name:{width}}  {choice}", flush=True)


def _peer(settings: BenchConfig, llm: "LLM") -> "Peer | None":
    if settings.against is None:
        return None
    from glm5.bench.peer import Peer

    assert llm.path is not None
    return Peer(llm.path, dtype=settings.dtype, device=settings.device)
