"""The program of a front end: `python -m glm5.serve.front_end LISTENER CONNECTION CWD`, started only by
`coordination/front_ends.py`, with the numbers of an inherited listening socket and of the connection to its parent.

It answers HTTP as a server of one process does. What several processes share is kept by the parent (`Remote`); the
engine is another process, of which this one is a client. It exits when the connection ends.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

from glm5.chat.template import ChatTemplate
from glm5.common import log
from glm5.common.errors import GlmError
from glm5.common.garbage import settle
from glm5.config.serve import ServeConfig
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.joined import JoinedLLM
from glm5.engine.transport.joined import JoinedLink
from glm5.serve.app import create_app
from glm5.serve.coordination.messages import (
    Abort,
    Begin,
    Heartbeat,
    NameWeights,
    Report,
    Serve,
    State,
    Stop,
    StopListening,
    ToFrontEnd,
)
from glm5.serve.coordination.peer import Peer
from glm5.serve.coordination.remote import Remote, beat
from glm5.serve.http.keys import Key, KeyRing
from glm5.serve.http.server import AppWhenReady, Server
from glm5.serve.metrics.tracing import Tracing
from glm5.serve.service.service import Service
from glm5.serve.service.state import ServerState
from glm5.serve.service.weight_names import WeightNames

logger = logging.getLogger(__name__)


class FrontEnd:
    """The server of this process, which its parent directs by messages."""

    def __init__(self, begin: Begin, listener: socket.socket, main: Peer):
        self.begin, self.config = begin, ServeConfig.model_validate(begin.settings)
        self.state, self.main, self.remote = ServerState(), main, Remote(main)
        self.app, self.service = AppWhenReady(self.state), cast("Service | None", None)
        self.weight_names = WeightNames()
        self.weight_names.known.update(begin.weight_names)
        endpoint = self.config.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing.to(endpoint)
        self.server = Server(self.app, listener, self.config.client_timeout)
        self._serving = asyncio.ensure_future(self.server.serve())
        self._serving.add_done_callback(self._exit)
        self._beating = asyncio.ensure_future(beat(main, self.state, self._heartbeat))
        self._link: JoinedLink | None = None
        self._engine: AsyncEngine | None = None

    def handle(self, message: Any) -> Any:
        """The answer to a message of the parent, or a coroutine for it."""
        match message:
            case State():
                return self._take_state(message)
            case Serve():
                return self._join(message)
            case Report():
                self.main.send(self._heartbeat())
            case Abort(tenant, name):
                return 0 if self.service is None else self.service.abort_here(tenant, name)
            case NameWeights(version, name):
                self.weight_names.set(version, name)
            case StopListening():
                return self.server.end_listening()
            case Stop(seconds):
                self.server.begin_stop(seconds)
            case _:
                raise AssertionError(message)
        return None

    async def _take_state(self, news: State) -> int:
        self.state.change(
            not_serving=news.not_serving,
            is_draining=news.is_draining,
            is_closing=news.is_closing,
            num_restarts=news.num_restarts,
        )
        if news.not_serving is not None and self._link is not None:
            self._link.end(news.not_serving)
        if news.is_closing and self._engine is not None:
            await asyncio.to_thread(self._engine.close)  # running requests end with the reason
        return self.state.num_active

    async def _join(self, serve: Serve) -> None:
        try:
            engine = await asyncio.to_thread(self._engine_of, serve)
        except GlmError as error:  # the parent notices the end of an engine too
            logger.error("the engine cannot be joined: %s", error)
            return
        if self.service is None:
            self.app.app = self._make_app(engine)
            settle()
        else:
            self.service.engine.replace(engine)

    def _engine_of(self, serve: Serve) -> AsyncEngine:
        if self._engine is not None:
            self._engine.close()
        self._link = JoinedLink(serve.folder, self.begin.client)
        llm = JoinedLLM(
            self._link,
            Path(serve.path),
            generation_config=self.config.generation_config,
            seed=serve.seed,
            table=serve.table,
        )
        self._engine = AsyncEngine(llm)
        self._engine.start()
        return self._engine

    def _make_app(self, engine: AsyncEngine) -> Any:
        config, llm = self.config, engine.llm
        template = ChatTemplate.for_checkpoint(
            llm.path,
            "shared" in llm.cfg.indexer_types,
            config.chat_template,
            llm.tokenizer,
            allow_control_tokens=config.allow_control_tokens_in_messages,
        )
        assert llm.tokenizer is not None
        app = create_app(
            engine,
            template,
            llm.tokenizer,
            config,
            keys=KeyRing([Key.model_validate(key) for key in self.begin.keys]),
            state=self.state,
            tracing=self.tracing,
            admission=self.remote,
            shared=self.remote,
            weight_names=self.weight_names,
            created=self.begin.created,
        )
        self.service = app.state.service
        return app

    def _heartbeat(self) -> Heartbeat:
        totals = {} if self.service is None else self.service.metrics.page.totals()
        return Heartbeat(totals, self.state.num_active)

    def _exit(self, served: asyncio.Task[None]) -> None:
        """The server has ended."""
        error = None if served.cancelled() else served.exception()
        if error is not None:
            logger.error("a front end has failed", exc_info=error)
        if self.tracing is not None:
            self.tracing.close()
        _end(0 if error is None else 1)


def main(listener: int, connection: int, cwd: str) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal or service manager may send them to all processes;
        signal.signal(number, signal.SIG_IGN)  # the parent handles them and tells this one
    with suppress(OSError):
        os.chdir(cwd)
    sockets = [socket.socket(fileno=number) for number in (listener, connection)]
    for each in sockets:
        each.set_inheritable(False)
        each.setblocking(False)  # noqa: FBT003 - the standard library's
    asyncio.run(_serve(*sockets))
    _end(1)  # the parent has ended


async def _serve(listener: socket.socket, connection: socket.socket) -> None:
    """Be a front end from the parent's first message on, until the connection ends."""
    front_end: FrontEnd | None = None

    def handle(message: Any) -> Any:
        nonlocal front_end
        if isinstance(message, Begin):
            log.configure(message.log_level, cast("log.Style", message.log_style))
            front_end = FrontEnd(message, listener, main)
            return None
        assert front_end is not None, f"{message=} before Begin"
        return front_end.handle(message)

    main = await Peer.on(connection, ToFrontEnd, handle)
    await main.run()


def _end(code: int) -> NoReturn:
    with suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)  # threads may wait, and there is nothing left to save


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
