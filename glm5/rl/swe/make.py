"""`glm5 env make swe`: tasks from packages with tests (faults.py) and from git repositories (history.py).

OUT has a folder for each source; the same command goes on where it was stopped. Tests run in boxes.
"""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from glm5.common.errors import ConfigError
from glm5.common.progress import Progress
from glm5.config.env import EnvMakeConfig
from glm5.rl.sandbox.choice import choose_backend
from glm5.rl.swe.faults import Faults
from glm5.rl.swe.history import History
from glm5.rl.swe.maker import Maker
from glm5.train.state import locked


def make_tasks(settings: EnvMakeConfig) -> str:
    """Make tasks of each source; returns a table by source. Raises ConfigError where none can be made."""
    out, backend = Path(settings.out), choose_backend(unsafe_local=settings.unsafe_local)
    sources = {Path(each).absolute().name.removesuffix(".tar.gz"): Path(each) for each in settings.source}
    with locked(out), Progress(None, "task", "make") as progress, ThreadPoolExecutor(settings.workers) as threads:
        makers = [
            (History if (path / ".git").exists() else Faults)(out / name, path, settings.tasks, backend, progress)
            for name, path in sources.items()
        ]
        try:
            told = list(threads.map(Maker.run, makers))
        finally:
            for maker in makers:
                maker.stop()
    kinds = Counter(task["kind"] for maker in makers for task in maker.known.values() if "kind" in task)
    lines = [f"{maker.folder.name}: {line}" for maker, line in zip(makers, told, strict=True)]
    if not kinds:
        raise ConfigError(f"no task was made: {'; '.join(lines)}")
    lines.append(", ".join(f"{kind} {count}" for kind, count in kinds.most_common()))
    return "\n".join([*lines, f"{kinds.total()} tasks of {len(kinds)} kinds: {out}"])
