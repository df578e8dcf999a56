"""Builds the application: routes, error handlers and middleware.

    CORS -> Access -> CancelOnDisconnect -> BoundedBody -> routes

Access checks API keys and limits. CORS is added only if --allowed-origins is given.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route

from glm5 import __version__
from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.config.serve import ServeConfig
from glm5.serve.anthropic.route import router as anthropic
from glm5.serve.chat.render import router as chat_render
from glm5.serve.chat.route import router as chat
from glm5.serve.completions.render import router as completions_render
from glm5.serve.completions.route import router as completions
from glm5.serve.generation.metered import Bounds, MeteredEngine
from glm5.serve.http import documents, errors
from glm5.serve.http.access import Access
from glm5.serve.http.disconnect import CancelOnDisconnect
from glm5.serve.http.hosts import Hosts
from glm5.serve.http.incoming import BoundedBody
from glm5.serve.http.keys import ANYONE, KeyRing
from glm5.serve.http.limits import Admission, Limits, OwnLimits
from glm5.serve.metrics.server_metrics import ServerMetrics
from glm5.serve.metrics.tracing import Tracing
from glm5.serve.operations.admin import router as admin
from glm5.serve.operations.health import Probe
from glm5.serve.operations.health import router as health
from glm5.serve.operations.metrics import router as metrics_page
from glm5.serve.operations.models import router as models
from glm5.serve.operations.not_served import router as not_served
from glm5.serve.operations.sessions import router as sessions
from glm5.serve.page.pages import router as pages
from glm5.serve.responses.route import router as responses
from glm5.serve.service.service import Engine, Service
from glm5.serve.service.sessions import Sessions
from glm5.serve.service.shared import OneProcess, Shared
from glm5.serve.service.state import ServerState
from glm5.serve.service.weight_names import WeightNames
from glm5.serve.sglang.info import router as sglang_info
from glm5.serve.sglang.loads import router as loads
from glm5.serve.sglang.route import router as sglang
from glm5.serve.vllm.generate import router as generate
from glm5.serve.vllm.info import router as vllm_info
from glm5.serve.vllm.tokens import router as tokens


def create_app(
    engine: Engine,
    template: ChatTemplate,
    tokenizer: Tokenizer,
    config: ServeConfig,
    *,
    keys: KeyRing | None = None,
    state: ServerState | None = None,
    tracing: Tracing | None = None,
    admission: Admission | None = None,
    shared: Shared | None = None,
    weight_names: WeightNames | None = None,
    created: int | None = None,
) -> FastAPI:
    """An application that serves a running engine; the caller starts and closes the engine.

    `keys` None: no API key is needed. `tracing` None: no traces. `state`: shared with the caller, which drains and
    stops the server through it. `admission`, `shared`, `weight_names` and `created`, the time of the start: of a server
    with several processes.
    """
    traced: dict[str, Any] = {} if tracing is None else {"telemetry": {"tracer_provider": tracing.provider}}
    app = FastAPI(title="glm5", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False, **traced)
    names = config.served_model_name or (config.model,)
    metrics, state = ServerMetrics(names[0]), state or ServerState()
    admission, shared = admission or OwnLimits(Limits.of(config)), shared or OneProcess()
    bounds = Bounds(config.max_prompt_tokens, config.max_output_tokens, config.request_timeout, config.stream_interval)
    log_tokenizer = tokenizer if config.enable_log_requests else None
    metered = MeteredEngine(engine, metrics, admission, bounds, log_tokenizer, tracing)
    service = Service(
        metered,
        template,
        tokenizer,
        names,
        config.model,
        state,
        metrics,
        config.profile_dir,
        processed_logprobs=config.logprobs_mode == "processed_logprobs",
        tokens_as_ids=config.return_tokens_as_token_ids,
        routed_experts=config.enable_return_routed_experts,
        sampling_masks=config.return_sampling_mask,
        only_offered_tools=config.only_offered_tools,
        created=int(time.time()) if created is None else created,
        shared=shared,
        sessions=Sessions(template, config.max_sessions, config.max_session_tokens) if config.max_sessions else None,
        weight_names=weight_names or WeightNames(),
    )
    app.state.service, app.state.probe = service, Probe()
    apis = (chat, completions, responses, anthropic, sglang, sglang_info, loads, vllm_info, tokens)
    apis = (*apis, generate, chat_render, completions_render)
    routers = (*apis, models, sessions, health, metrics_page, admin, pages, not_served)
    for router in routers:
        app.include_router(router)
    documents.install(app)
    errors.install(app)
    # The middleware added last runs first.
    app.add_middleware(BoundedBody, max_bytes=config.max_body_bytes, seconds=config.client_timeout)
    app.add_middleware(CancelOnDisconnect)
    keys = keys or KeyRing()
    hosts = Hosts(None if keys.is_needed and not config.allowed_hosts else (*config.allowed_hosts, config.host))
    routes = [route for router in routers for route in router.routes]
    metrics.begin(_handlers(routes), [key.name for key in keys.keys] if keys.is_needed else [ANYONE.name])
    given = {"keys": keys, "hosts": hosts, "admission": admission, "routes": routes}
    app.add_middleware(Access, **given, state=state, metrics=metrics)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=[
                "Authorization",
                "Content-Type",
                "X-Api-Key",
                "X-Request-Id",
                "X-Session-Id",
                "Anthropic-Version",
            ],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    return app


def _handlers(routes: Sequence[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and path of each documented route."""
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            yield from ((method, route.path) for method in sorted(route.methods or ()))
