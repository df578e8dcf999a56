"""SGLang's /get_model_info and /get_server_info, also under their newer names."""

import asyncio
import json
from typing import Any

from fastapi import APIRouter, Depends

from glm5 import __version__
from glm5.common.errors import GlmError
from glm5.engine.transport.wire import EngineInfo
from glm5.serve.metrics.server_metrics import STATS_SECONDS
from glm5.serve.service.service import Service, get_service

router = APIRouter(tags=["info"])

Info = dict[str, Any]


@router.get("/get_model_info")
@router.get("/model_info")
async def model_info(service: Service = Depends(get_service)) -> Info:
    """The model, and the version of its weights."""
    cfg, defaults = service.engine.cfg, dict(service.engine.defaults.sampling)
    stats = await _stats(service)
    return {
        "model_path": service.root,
        "tokenizer_path": service.root,
        "served_model_name": service.model_names[0],
        "is_generation": True,
        "preferred_sampling_params": json.dumps(defaults) if defaults else None,
        "weight_version": _version(stats, service),
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "max_model_len": service.engine.max_model_len,
        **{name: cfg.to_dict()[name] for name in ("model_type", "architectures")},
    }


@router.get("/get_weight_version")
@router.get("/weight_version")
async def weight_version(service: Service = Depends(get_service)) -> Info:
    """The version of the weights in use; null if the engine does not answer in time."""
    return {"weight_version": _version(await _stats(service), service)}


@router.get("/get_server_info")
@router.get("/server_info")
async def server_info(service: Service = Depends(get_service)) -> Info:
    """The resolved configuration, and the current state of the engine."""
    engine, stats = service.engine, await _stats(service)
    return {
        "model_path": service.root,
        "tokenizer_path": service.root,
        "served_model_name": service.model_names[0],
        "chat_template": service.template.name,
        "always_thinks": service.template.always_thinks,
        "context_length": engine.max_model_len,
        "max_model_len": engine.max_model_len,
        "tp_size": int(dict(engine.table).get("ranks", "1").partition(",")[0]),
        **dict.fromkeys(("pp_size", "dp_size", "ep_size"), 1),
        "page_size": engine.info.page_size,
        "kv_events": _kv_events(engine.info),
        "resolved": dict(engine.table),
        "weight_version": _version(stats, service),
        "version": __version__,
        "vllm_config": _vllm_config(service),
        "internal_states": [_state(stats)],
    }


def _vllm_config(service: Service) -> Info:
    """What TRL reads of vLLM's route of this name: what log-probabilities are, and that it cannot send weights."""
    mode = "processed_logprobs" if service.processed_logprobs else "raw_logprobs"
    model = {"model": service.root, "max_model_len": service.engine.max_model_len, "logprobs_mode": mode}
    return {"model_config": model, "weight_transfer_config": None}


async def _stats(service: Service) -> Info | None:
    """The engine's statistics; None if it does not answer in time."""
    try:
        async with asyncio.timeout(STATS_SECONDS):
            return await service.engine.stats()
    except (TimeoutError, GlmError):
        return None


def _kv_events(info: EngineInfo) -> Info | None:
    """Where SGLang's router subscribes to events of the KV cache; it puts the worker's host in the place of "*"."""
    if info.kv_events is None or not info.kv_events.endpoint.startswith("tcp://"):
        return None
    host, _, port = info.kv_events.endpoint.removeprefix("tcp://").rpartition(":")
    return {
        "publisher": "zmq",
        "endpoint_host": "*" if host in ("0.0.0.0", "[::]") else host,
        "endpoint_port_base": int(port),
        "topic": info.kv_events.topic,
        "block_size": info.page_size,
        "dp_size": 1,
    }


def _version(stats: Info | None, service: Service) -> str | None:
    return None if stats is None else service.weight_names.of(stats["weight_version"])


def _state(stats: Info | None) -> Info:
    """The fields that load generators and RL trainers read. The accepted length includes the sampled token."""
    if stats is None:
        return {"avg_spec_accept_length": None}
    drafted, accepted, pages = stats["speculation"]["drafted"], stats["speculation"]["accepted"], stats["pages"]
    num_drafts = drafted[0] if drafted else 0
    return {
        "avg_spec_accept_length": 1 + sum(accepted) / num_drafts if num_drafts else None,
        "num_running_reqs": stats["prompting"] + stats["decoding"],
        "num_waiting_reqs": stats["waiting"],
        "token_usage": pages["in_use"] / pages["all"] if pages["all"] else 0.0,
        "stats": stats,
    }
