"""SGLang's GET /v1/loads, by which routers learn how busy a worker is: its fields as of SGLang 0.5.23.

A server has one engine, so `loads` has one entry, of data-parallel rank 0. Parts that this engine does not have (lora)
are left out, as SGLang leaves them out.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Depends, Response

from glm5 import __version__
from glm5.common.errors import GlmError
from glm5.engine.transport.wire import EngineInfo
from glm5.serve.http.body import documented
from glm5.serve.http.errors import ApiError
from glm5.serve.metrics.prometheus import CONTENT_TYPE
from glm5.serve.service.service import Service, get_service

router = APIRouter(tags=["info"])

SECTIONS = ("core", "memory", "spec", "lora", "disagg", "queues", "all")
_FIELD = {"memory": "memory", "spec": "speculative", "disagg": "disaggregation", "queues": "queues"}
SECTION_KEYS = frozenset(_FIELD.values())
_PREFIX = {"speculative": "spec", "disaggregation": "disagg"}
_GIB = 2**30

Load = dict[str, Any]


@router.get("/v1/loads", response_model=None, responses=documented(400))
async def loads(
    dp_rank: int | None = None,
    include: str | None = None,
    format: str | None = None,
    service: Service = Depends(get_service),
) -> Load | Response:
    """The load of each data-parallel rank. `include`: sections, separated by commas; `format`: json or prometheus."""
    wanted = _sections(include)
    if dp_rank not in (None, 0):
        raise ApiError(400, f"dp_rank is {dp_rank}; allowed: 0, the only one", param="dp_rank")
    if format not in (None, "json", "prometheus"):
        raise ApiError(400, f"format is {format!r:.60}; allowed: json, prometheus", param="format")
    load = await _load(service)
    for section in SECTION_KEYS - wanted:
        del load[section]
    if format == "prometheus":
        return Response(_prometheus(load), media_type=CONTENT_TYPE)
    info = service.engine.info
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": __version__,
        "accelerator": info.accelerator,
        "num_accelerators": info.num_ranks,
        "loads": [load],
    }


def _sections(include: str | None) -> frozenset[str]:
    """Keys of the sections that a query names; all by default."""
    names = {name.strip() for name in include.split(",")} if include else {"all"}
    if unknown := sorted(names.difference(SECTIONS)):
        raise ApiError(400, f"include has {unknown[0]!r:.60}; allowed: {', '.join(SECTIONS)}", param="include")
    return SECTION_KEYS if "all" in names else frozenset(_FIELD[name] for name in names if name in _FIELD)


async def _load(service: Service) -> Load:
    """Figures as of now, or the last ones while the engine is in a long step. Raises ApiError 503 without any."""
    metrics = service.metrics
    try:
        await metrics.read_engine(service.engine)
    except GlmError as error:
        raise ApiError(503, f"the engine is not running: {error}", code="engine_stopped", retry_after=5) from None
    if metrics.engine_stats is None:
        raise ApiError(503, "the engine has not answered yet", code="engine_slow", retry_after=1)
    return load_of(metrics.engine_stats, service.engine.info, metrics.throughput.value, metrics.hit_rate.value())


def load_of(stats: Mapping[str, Any], info: EngineInfo, throughput: float, hit_rate: float) -> Load:
    """One entry of `loads`, with all sections."""
    running, used = stats["prompting"] + stats["decoding"], stats["pages"]["in_use"] * info.page_size
    drafted, accepted = stats["speculation"]["drafted"], stats["speculation"]["accepted"]
    num_drafts = drafted[0] if drafted else 0
    return {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": stats["waiting"],
        "num_waiting_uncached_tokens": stats["uncached_tokens"],
        "num_used_tokens": used,
        "num_total_tokens": used + stats["waiting_tokens"],
        "num_active_tokens": used + stats["waiting_tokens"],
        "max_total_num_tokens": info.num_pages * info.page_size,
        "max_running_requests": info.max_num_seqs,
        "token_usage": round(stats["pages"]["in_use"] / stats["pages"]["all"], 4) if stats["pages"]["all"] else 0.0,
        "gen_throughput": round(throughput, 2),
        "cache_hit_rate": round(hit_rate, 4),
        "utilization": round(running / info.max_num_seqs, 4),
        "total_prefill_uncached_tokens": stats["prefill"]["tokens"],
        "total_prefill_busy_us": stats["prefill"]["busy_us"],
        "decode_moments": stats["decode_moments"],
        "memory": {
            "weight_gb": round(info.weight_bytes / _GIB, 3),
            "kv_cache_gb": round(info.cache_bytes / _GIB, 3),
            "graph_gb": 0.0,
            "token_capacity": info.num_pages * info.page_size,
        },
        "speculative": {
            "accept_length": round(1 + sum(accepted) / num_drafts, 4) if num_drafts else 1.0,
            "accept_rate": round(sum(accepted) / sum(drafted), 4) if sum(drafted) else 0.0,
        },
        "disaggregation": {
            "mode": "null",
            **dict.fromkeys(
                (
                    "prefill_bootstrap_queue_reqs",
                    "prefill_inflight_queue_reqs",
                    "decode_prealloc_queue_reqs",
                    "decode_transfer_queue_reqs",
                    "decode_retracted_queue_reqs",
                ),
                0,
            ),
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        },
        "queues": {
            "waiting": stats["waiting"],
            "grammar": stats["held"],
            "paused": 0,
            "retracted": stats["retracted"],
        },
    }


def _prometheus(load: Load) -> str:
    """The numbers as gauges under SGLang's names."""
    lines: list[str] = []
    for name, value in load.items():
        if name == "dp_rank":
            continue
        section = value if isinstance(value, dict) else {"": value}
        for key, number in section.items():
            if isinstance(number, (int, float)):
                full = "_".join(("sglang", _PREFIX.get(name, name), *([key] if key else [])))
                lines += [f"# TYPE {full} gauge", f'{full}{{dp_rank="{load["dp_rank"]}"}} {number}']
    return "\n".join(lines) + "\n"
