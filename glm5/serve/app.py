"""The application, put together: routes, error envelope, and the watch for clients that leave."""

from fastapi import FastAPI

from glm5 import __version__
from glm5.chat.template import ChatTemplate
from glm5.chat.tokenizer import Tokenizer
from glm5.config.serve import ServeConfig
from glm5.serve import chat, errors, models, pages
from glm5.serve.disconnect import CancelOnDisconnect
from glm5.serve.service import Engine, Service


def create_app(engine: Engine, template: ChatTemplate, tokenizer: Tokenizer, config: ServeConfig) -> FastAPI:
    """An application that serves a running engine; starting and closing the engine is the caller's."""
    app = FastAPI(title="glm5", version=__version__)
    names = config.served_model_name or (config.model,)
    app.state.service = Service(engine, template, tokenizer, names, root=config.model)
    app.include_router(chat.router)
    app.include_router(models.router)
    app.include_router(pages.router)
    app.add_middleware(CancelOnDisconnect)
    errors.install(app)
    return app
