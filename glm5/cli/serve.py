"""`glm5 serve`: an OpenAI-compatible server for one model."""

import argparse
from typing import Any

from glm5.cli.flags import add_flags, notes, read
from glm5.cli.loading import load_llm, load_template, resolved
from glm5.common.console import out
from glm5.common.errors import EngineDead
from glm5.common.extras import require
from glm5.config.serve import ServeConfig


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="serve a model over the OpenAI API", description=ServeConfig.__doc__)
    add_flags(parser, ServeConfig)


def run(args: argparse.Namespace) -> int:
    settings = read(ServeConfig, args)
    for package in ("fastapi", "uvicorn"):
        require(package, "serve")
    from glm5.serve.server import bind, serve, url_of

    for line in notes(settings):
        out(line, flush=True)
    # Before the model is loaded: an address that is taken should not cost minutes to find out.
    with bind(settings.host, settings.port) as listener:
        from glm5.engine.async_engine import AsyncEngine
        from glm5.engine.link import CLOSED
        from glm5.serve.app import create_app

        llm = load_llm(settings, settings.engine_config())
        with AsyncEngine(llm) as engine:
            template = load_template(settings, llm)
            assert llm.tokenizer is not None
            url = url_of(listener)
            app = create_app(engine, template, llm.tokenizer, settings)
            names = ", ".join(app.state.service.model_names)
            for line in resolved(settings, llm, template, name=names):
                out(line)
            serve(app, engine, listener, lambda: out(f"listening on {url}", flush=True))
            if (reason := engine.stopped_because) not in (None, CLOSED):
                raise EngineDead(reason)
    return 0
