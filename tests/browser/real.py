"""The real application, before an engine of the test's choice."""

from contextlib import AbstractContextManager

from glm5.chat.template import ChatTemplate
from glm5.config.serve import ServeConfig
from glm5.serve.app import create_app
from glm5.serve.http.server import bind, serving
from glm5.serve.service.service import Engine
from tests.support.tokenizers import tiny_tokenizer


def application(engine: Engine) -> AbstractContextManager[str]:
    """Serve on a thread while the block runs; gives the address. Closes the engine."""
    tokenizer = tiny_tokenizer()
    config = ServeConfig(model="org/tiny", served_model_name=("tiny",))
    app = create_app(engine, ChatTemplate.bundled("glm-5.1", tokenizer), tokenizer, config)
    return serving(app, engine, bind("127.0.0.1", 0))
