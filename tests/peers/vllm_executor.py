"""vLLM's executor without a model: each step gives every sequence its next token, a letter.

`measure_vllm.py` starts vLLM with `--distributed-executor-backend vllm_executor.ScriptedExecutor`. The front end, the
engine's process with its scheduler and the messages between them are vLLM's own.
"""

import os
import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import ModelRunnerOutput

_ANSWERS = {
    "get_kv_cache_spec": {},  # as of a model without attention
    "get_supported_kv_cache_layouts": ["LBHNC"],
    "get_supported_tasks": ("generate",),
    "supports_draft_weight_updates": False,
}


class ScriptedExecutor(Executor):
    """STEP_RATE: steps a second, 0 for as many as possible."""

    def _init_executor(self) -> None:
        rate = float(os.environ["STEP_RATE"])
        self._seconds, self._next = 1 / rate if rate else 0.0, 0.0
        self._counts: dict[str, int] = {}  # tokens of running sequences, from some start of each

    def collective_rpc(self, method: Any, timeout=None, args=(), kwargs=None, non_block=False) -> list[Any]:
        return [] if method == "compile_or_warm_up_model" else [_ANSWERS.get(method)]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for req_id in scheduler_output.finished_req_ids:
            self._counts.pop(req_id, None)
        if not self._counts:
            self._next = time.monotonic()
        for new in scheduler_output.scheduled_new_reqs:
            self._counts[new.req_id] = hash(new.req_id)
        req_ids = list(scheduler_output.num_scheduled_tokens)
        if req_ids:
            time.sleep(max(0.0, self._next - time.monotonic()))
            self._next += self._seconds
        for req_id in req_ids:
            self._counts[req_id] += 1
        tokens = [[ord("a") - 33 + self._counts[req_id] % 26] for req_id in req_ids]
        output = ModelRunnerOutput(req_ids, {req_id: row for row, req_id in enumerate(req_ids)}, tokens)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def check_health(self) -> None:
        """It is well."""
