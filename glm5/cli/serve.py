"""`glm5 serve`: a server for one model, under OpenAI's, Anthropic's and SGLang's APIs."""

import argparse
import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5.cli.flags import add_flags, notes, read
from glm5.cli.loading import check, load_llm, load_template, resolved
from glm5.cli.parser import Parser
from glm5.common import open_files
from glm5.common.console import tell
from glm5.common.extras import require
from glm5.common.garbage import settle
from glm5.common.interrupt import held_interrupt
from glm5.common.start_log import Waits
from glm5.config.serve import ServeConfig

if TYPE_CHECKING:
    import socket

    from glm5.chat.template import ChatTemplate
    from glm5.engine.async_engine import AsyncEngine
    from glm5.serve.coordination.front_ends import FrontEnds
    from glm5.serve.http.keys import KeyRing
    from glm5.serve.metrics.tracing import Tracing
    from glm5.serve.service.state import ServerState


def add(parser: Parser) -> None:
    add_flags(parser, ServeConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(ServeConfig, args)
    with held_interrupt():  # some modules catch every exception at import, also that of a signal
        for package in ("fastapi", "uvicorn"):
            require(package, "serve")
        from glm5.engine.checks import check_gpus
        from glm5.serve.http.server import bind
        from glm5.serve.metrics.tracing import Tracing
        from glm5.serve.operations.supervise import ServerSetup
        from glm5.serve.operations.supervise import run as supervise
        from glm5.serve.service.state import ServerState

        for line in notes(settings):
            tell(line)
        # Options, keys, traces and the address are checked first: loading the model takes minutes.
        check(settings, engine := settings.engine_config())
        check_gpus(settings.device, engine.tensor_parallel_size)
        keys, endpoint = read_keys(settings), settings.otlp_traces_endpoint
        tracing = None if endpoint is None else Tracing.to(endpoint)  # several front ends make their own
        program = _Program(settings, keys, ServerState(), tracing)
    open_files.allow_many()
    with bind(settings.host, settings.port, settings.client_timeout) as listener:
        program.front = _front_ends(program, listener) if settings.api_server_count > 1 else None
        setup = ServerSetup(
            import_modules=program.import_modules,
            start=program.start,
            make_app=program.make_app,
            replace=program.replace,
            report=tell,
            state=program.state,
            supervise=settings.supervise,
            client_timeout=settings.client_timeout,
            shutdown_timeout=settings.shutdown_timeout,
            dead_engine_timeout=settings.dead_engine_timeout,
            front=program.front,
        )
        try:
            supervise(setup, listener)
        finally:
            program.close()
    return 0


def read_keys(settings: ServeConfig) -> "KeyRing":
    """The API keys of the flags, the environment and the file. Raises ConfigError."""
    from glm5.serve.http.keys import KeyRing, plain_keys, read_file

    users = [*settings.api_key, *_listed("GLM5_API_KEY")]
    admins = [*([settings.admin_api_key] if settings.admin_api_key else []), *_listed("GLM5_ADMIN_API_KEY")]
    keys = plain_keys(users, "user", "key") + plain_keys(admins, "admin", "admin")
    if settings.api_keys_file is not None:
        keys += read_file(Path(settings.api_keys_file).expanduser())
    return KeyRing(keys)


def _front_ends(program: "_Program", listener: "socket.socket") -> "FrontEnds":
    from glm5.serve.coordination.front_ends import FrontEnds

    settings = program.settings
    return FrontEnds(settings.api_server_count, settings, program.keys.keys, program.state, listener)


class _Program:
    """Starts the engines of a server, and makes the application in front of them."""

    def __init__(self, settings: ServeConfig, keys: "KeyRing", state: "ServerState", tracing: "Tracing | None"):
        self.settings, self.keys, self.state, self.tracing = settings, keys, state, tracing
        self.front: FrontEnds | None = None
        self._app: Any = None
        self._is_shown = False  # the resolved choices are printed

    def import_modules(self) -> None:
        with Waits("importing torch and FastAPI"):
            names = ["glm5.checkpoint.resolve", "glm5.engine.async_engine", "glm5.serve.operations.health"]
            for name in names if self.front is not None else [*names, "glm5.serve.app"]:
                importlib.import_module(name)

    def start(self) -> "AsyncEngine":
        from glm5.engine.async_engine import AsyncEngine
        from glm5.serve.operations.health import warm_up

        settings = self.settings
        engine = AsyncEngine(load_llm(settings, settings.engine_config(), quantization=settings.quantization))
        engine.start()
        try:
            with Waits("waiting for a first answer"):
                warm_up(engine)
        except BaseException:
            engine.kill()
            raise
        return engine

    def make_app(self, engine: "AsyncEngine") -> Any:
        from glm5.serve.app import create_app

        llm = engine.llm
        template = load_template(self.settings, llm)
        assert llm.tokenizer is not None
        self._app = create_app(
            engine, template, llm.tokenizer, self.settings, keys=self.keys, state=self.state, tracing=self.tracing
        )
        self._print_choices(engine, template)
        settle()
        return self._app

    def replace(self, engine: "AsyncEngine") -> None:
        if self.front is None:
            self._app.state.service.engine.replace(engine)
            return
        if not self._is_shown:
            self._print_choices(engine, load_template(self.settings, engine.llm))
        self.front.show(engine)

    def _print_choices(self, engine: "AsyncEngine", template: "ChatTemplate") -> None:
        self._is_shown = True
        for line in resolved(self.settings, engine.llm, template, **own_rows(self.settings)):
            tell(line)

    def close(self) -> None:
        if self.tracing is not None:
            self.tracing.close()


def own_rows(settings: ServeConfig) -> dict[str, str]:
    """Rows of the start table that only a server has."""
    rows = {"name": ", ".join(settings.served_model_name or (settings.model,))}
    if settings.api_server_count > 1:
        rows["front ends"] = f"{settings.api_server_count} processes answer HTTP"
    if (events := settings.kv_events_config) is not None and events.is_on:
        where = "listens at" if events.listens else "connects to a subscriber that listens at"
        rows["kv events"] = f"the engine {where} {events.endpoint}"
    return rows


def _listed(variable: str) -> list[str]:
    return [key.strip() for key in os.environ.get(variable, "").split(",") if key.strip()]
