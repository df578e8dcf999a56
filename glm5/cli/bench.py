"""`glm5 bench throughput` and `glm5 bench latency`: our engine beside a peer. Tables go to standard output."""

from pathlib import Path
from typing import TYPE_CHECKING

from glm5.common.console import out
from glm5.common.errors import UsageError
from glm5.config.bench import BenchConfig

if TYPE_CHECKING:
    from glm5.bench.peer import Peer
    from glm5.engine.llm import LLM


def run(command: str, settings: BenchConfig) -> int:
    """Measure and show what `settings` ask for."""
    if settings.json_ is not None and not Path(settings.json_).resolve().parent.is_dir():
        raise UsageError(f"--json: there is no folder {Path(settings.json_).parent}")
    if settings.against is not None:
        from glm5.bench.peer import check

        check()
    from glm5.bench.measure import measure
    from glm5.bench.report import document, table, write_json
    from glm5.engine.llm import LLM

    model = {"dtype": settings.dtype, "device": settings.device}
    with LLM(settings.model, **model, **settings.engine_config().model_dump()) as llm:
        width = max(len(name) for name, _ in llm.table)
        for name, choice in (("model", settings.model), *llm.table):
            out(f"{name:{width}}  {choice}", flush=True)
        measured = measure(settings, llm, _peer(settings, llm))
        found = document(command, settings, measured, dict(llm.table))
    out("\n" + table(found))
    if settings.json_ is not None:
        write_json(settings.json_, found)
    return 0


def _peer(settings: BenchConfig, llm: "LLM") -> "Peer | None":
    if settings.against is None:
        return None
    from glm5.bench.peer import Peer

    assert llm.path is not None
    return Peer(llm.path, dtype=settings.dtype, device=settings.device)
