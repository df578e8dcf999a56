"""Admin routes, which change the engine for all tenants. They need an admin key and have SGLang's and vLLM's names.

Settings come as JSON or in the query string. Unknown fields are refused, so that a mistyped setting does not silently
keep its default. These routes have their own OpenAPI document, /admin/openapi.json.
"""

import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

from fastapi import APIRouter, Depends, Request

from glm5.common.errors import EngineDead, GlmError, RequestError
from glm5.serve.http.body import Body, described, parse
from glm5.serve.http.errors import ApiError
from glm5.serve.service.service import Service, get_service

logger = logging.getLogger(__name__)

router = APIRouter(tags=["admin"])

MAX_NAME = 256  # characters in the name of a weight version

Done = dict[str, Any]
Part = Literal["weights", "kv_cache"]


class Nothing(Body):
    """No settings."""


class Profile(Body):
    """No settings. vLLM's load generator sends the fields of a benchmark request along; they are ignored."""

    meaningless = frozenset(
        {"prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "repetition_penalty", "logprobs"}
        | {"stream", "stream_options", "ignore_eos", "top_p", "top_k", "min_p"}
    )


class Pause(Body):
    """What happens to running requests: "abort" ends them, "in_place" keeps them waiting with their KV cache."""

    mode: Literal["abort", "in_place"] = "abort"


class Release(Body):
    """Weights and KV cache are released together: `tags` has both, or is left out."""

    tags: list[Part] | None = None


class Wake(Body):
    """`tags`: the memory to allocate again, by default all of it. Weights can be updated once their memory is back,
    requests continue once all of it is."""

    tags: list[Part] | None = None


class Sleep(Body):
    """Level 1 frees the KV cache and moves the weights to host memory; level 2 drops the weights."""

    level: Literal[1, 2] = 1


class NewWeights(Body):
    """`model_path`: a checkpoint folder on the server's machine. `flush_cache` false keeps the KV cache that running
    requests computed with the old weights; `abort_all_requests` aborts these requests. `weight_version`: a name that
    SGLang's routes report, or a number above the current one."""

    refused = {
        "load_format": ("auto",),
        "is_async": (False,),
        "keep_pause": (False,),
        "recapture_cuda_graph": (False,),
    }
    meaningless = frozenset({"torch_empty_cache", "token_step"})

    model_path: str
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: int | str | None = None

    def version(self) -> tuple[int | None, str | None]:
        """The number and the name of the new version; None for what is not given."""
        given = self.weight_version
        if not isinstance(given, str):
            return given, None
        if len(given) > MAX_NAME:
            allowed = f"up to {MAX_NAME} characters, or a number"
            raise ApiError(400, f"weight_version is {given!r:.60}; allowed: {allowed}", param="weight_version")
        return None, given


B = TypeVar("B", bound=Body)


def settings_of(kind: type[B]) -> Callable[[Request], Awaitable[B]]:
    """FastAPI dependency: the settings of an admin request. Refuses unknown fields."""

    async def read(request: Request) -> B:
        raw = await request.body()
        if request.query_params:
            if raw.strip():
                raise ApiError(400, "the request has settings in the query and in the body; allowed: one of the two")
            raw = json.dumps(_query(request)).encode()
        settings = parse(kind, raw if raw.strip() else b"{}")
        if unknown := sorted((settings.model_extra or {}).keys() - kind.refused.keys() - kind.meaningless):
            known = ", ".join(name for name in kind.model_fields if name != "model") or "none"
            raise ApiError(
                400, f"{unknown[0]!r:.60} is no setting of this route; allowed: {known}", param=unknown[0][:60]
            )
        return settings

    return read


@router.get("/flush_cache", operation_id="flush_cache_by_get")
@router.post("/flush_cache", openapi_extra=described(Nothing))
async def flush_cache(_: Nothing = Depends(settings_of(Nothing)), service: Service = Depends(get_service)) -> Done:
    """Drop every cached prefix that no running request uses, in every tier."""
    with _engine_errors_as_400():
        await service.engine.reset_prefix_cache()
    return _done("the cache is flushed, except for the prefixes of running requests")


@router.post("/start_profile", openapi_extra=described(Profile))
async def start_profile(_: Profile = Depends(settings_of(Profile)), service: Service = Depends(get_service)) -> Done:
    """Start a profiler trace of the engine, for Perfetto."""
    if service.profile_dir is None:
        raise ApiError(400, "the server has no folder for traces: start it with --profile-dir", code="no_profile_dir")
    with _engine_errors_as_400():
        await service.engine.profile(service.profile_dir)
    return _done("a profile is being recorded; /stop_profile writes it")


@router.post("/stop_profile", openapi_extra=described(Profile))
async def stop_profile(_: Profile = Depends(settings_of(Profile)), service: Service = Depends(get_service)) -> Done:
    """Stop the trace and write it to a file."""
    with _engine_errors_as_400():
        path = await service.engine.profile(None)
    return _done("the profile is written", path=path)


@router.post("/pause_generation", openapi_extra=described(Pause))
async def pause_generation(
    settings: Pause = Depends(settings_of(Pause)), service: Service = Depends(get_service)
) -> Done:
    """Pause the engine. The response comes when the current step has ended. New requests wait."""
    with _engine_errors_as_400():
        await service.engine.pause()
        if settings.mode == "abort":
            await service.engine.abort_all()
    return _done(f"generation is paused ({settings.mode})")


@router.post("/continue_generation", openapi_extra=described(Nothing))
async def continue_generation(
    _: Nothing = Depends(settings_of(Nothing)), service: Service = Depends(get_service)
) -> Done:
    """Resume after a pause."""
    with _engine_errors_as_400():
        await service.engine.resume()
    return _done("generation is resumed")


@router.post("/update_weights_from_disk", openapi_extra=described(NewWeights))
async def update_weights_from_disk(
    settings: NewWeights = Depends(settings_of(NewWeights)), service: Service = Depends(get_service)
) -> Done:
    """Load new weights from a checkpoint folder. All of them are checked before the first is replaced."""
    number, name = settings.version()
    policy = "abort" if settings.abort_all_requests else "recompute" if settings.flush_cache else "keep"
    with _engine_errors_as_400():
        version = await service.engine.update_weights(settings.model_path, policy=policy, version=number)
    service.weight_names.set(version, name)
    await service.shared.name_weights_elsewhere(version, name)
    logger.info("loaded the weights of %s, version %d (%r)", settings.model_path, version, name)
    return _done("the weights are replaced", weight_version=version if name is None else name)


@router.post("/release_memory_occupation", openapi_extra=described(Release))
async def release_memory_occupation(
    settings: Release = Depends(settings_of(Release)), service: Service = Depends(get_service)
) -> Done:
    """Release the memory of KV cache and weights; requests wait."""
    _check_all(settings)
    with _engine_errors_as_400():
        freed = await service.engine.sleep(1)
    return _done("the memory is released", freed_bytes=freed)


@router.post("/resume_memory_occupation", openapi_extra=described(Wake))
async def resume_memory_occupation(
    settings: Wake = Depends(settings_of(Wake)), service: Service = Depends(get_service)
) -> Done:
    """Allocate the released memory again, or parts of it. Requests continue when all of it is back."""
    with _engine_errors_as_400():
        await service.engine.wake_up(settings.tags or None)
    return _done(f"the memory is allocated again ({', '.join(settings.tags or get_args(Part))})")


@router.post("/sleep", openapi_extra=described(Sleep))
async def sleep(settings: Sleep = Depends(settings_of(Sleep)), service: Service = Depends(get_service)) -> Done:
    """vLLM's name of release_memory_occupation, with a level."""
    with _engine_errors_as_400():
        freed = await service.engine.sleep(settings.level)
    return _done(f"the engine sleeps at level {settings.level}", freed_bytes=freed)


@router.post("/wake_up", openapi_extra=described(Wake))
async def wake_up(settings: Wake = Depends(settings_of(Wake)), service: Service = Depends(get_service)) -> Done:
    """vLLM's name of resume_memory_occupation."""
    return await resume_memory_occupation(settings, service)


def _query(request: Request) -> dict[str, Any]:
    """Settings in a query string. Values are JSON or plain text; a list repeats its name."""
    settings: dict[str, Any] = {}
    for name in request.query_params:
        values = request.query_params.getlist(name)
        settings[name] = values if name == "tags" else _value(values[-1])
    return settings


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _check_all(settings: Release) -> None:
    parts = get_args(Part)
    if settings.tags is not None and set(settings.tags) != set(parts):
        raise ApiError(400, f"tags are {settings.tags}; allowed: {' and '.join(parts)}, or none", param="tags")


@contextmanager
def _engine_errors_as_400() -> Iterator[None]:
    """Turns an error of the engine into ApiError 400 with the same message: the operator can fix the cause."""
    try:
        yield
    except (EngineDead, RequestError):
        raise
    except GlmError as error:
        raise ApiError(400, str(error), code="refused_by_engine") from None


def _done(message: str, **more: Any) -> Done:
    return {"success": True, "message": message, **more}
