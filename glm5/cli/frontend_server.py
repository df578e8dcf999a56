"""The server of `glm5 bench frontend`: `python frontend_server.py '{"model": ...}'`, settings of `glm5 serve` as JSON.

It writes its address to standard output, and for each line of standard input the processor time that it has used.
"""

import json
import sys
import time
from functools import partial

from glm5.chat.template import ChatTemplate
from glm5.common import open_files
from glm5.config.serve import ServeConfig
from glm5.engine import llm as llm_module
from glm5.engine.async_engine import AsyncEngine
from glm5.engine.llm import LLM
from glm5.engine.transport.wire import Start


def main(settings: str) -> None:
    """Serve until standard input ends."""
    from glm5.serve.app import create_app
    from glm5.serve.http.server import bind, serving

    given = json.loads(settings)
    # A module without its package: that package may be of another version, without this module.
    llm_module.Start = partial(Start, builder="scripted_engine:build")
    config = ServeConfig.model_validate(given)
    open_files.allow_many()
    llm = LLM(config.model, device="cpu", max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len)
    assert llm.tokenizer is not None
    template = ChatTemplate.bundled("glm-5.1", llm.tokenizer)
    with AsyncEngine(llm) as engine:
        app = create_app(engine, template, llm.tokenizer, config)
        with serving(app, engine, bind("127.0.0.1", 0)) as url:
            sys.stdout.write(f"{url}\n")
            sys.stdout.flush()
            for _ in sys.stdin:
                sys.stdout.write(f"{time.process_time()}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
