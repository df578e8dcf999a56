"""Traces of the engine by torch's profiler: files for Perfetto or chrome://tracing."""

import os
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from glm5.common.errors import GlmError


class Profiling:
    """At most one trace at a time, of the thread that starts and stops it and of the GPU."""

    def __init__(self) -> None:
        self._running: tuple[profile, Path] | None = None

    def start(self, folder: str) -> None:
        """Start a trace that is written to `folder`. GlmError if one is running, or the folder cannot be created."""
        if self._running is not None:
            raise GlmError("a profile is being recorded already; stop it first")
        path = Path(folder)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise GlmError(f"profiles cannot be written to {folder}: {error.strerror}") from None
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
        profiler = profile(activities=kinds)
        profiler.start()
        self._running = profiler, path

    def stop(self) -> str:
        """End the trace and write it; its path. GlmError if none is running."""
        if self._running is None:
            raise GlmError("no profile is being recorded; start one first")
        (profiler, folder), self._running = self._running, None
        profiler.stop()
        path = folder / f"glm5-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.trace.json.gz"
        try:
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise GlmError(f"the profile cannot be written to {path}: {error}") from None
        return str(path)
