"""One engine for the event loops of several processes: one process starts and watches it, the others join it.

share(engine, folder)                                  in the process that started the engine
AsyncEngine(JoinedLLM(JoinedLink(folder, 1), ...))     in another one, as client 1
forget(engine, 1)                                      after client 1 has ended: its requests are aborted
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from glm5.chat.tokenizer import Tokenizer
from glm5.config.model import ModelConfig
from glm5.engine.defaults import read_defaults
from glm5.engine.frontend.client import Client
from glm5.engine.transport.wire import Leave, Listen

if TYPE_CHECKING:
    from glm5.engine.transport.joined import JoinedLink
    from glm5.engine.transport.link import Link


class JoinedLLM:
    """The part of `LLM` that `AsyncEngine` and a server need. It waits until the engine is ready.

    `path`: the checkpoint's folder. `table`: the settings that the engine's owner resolved. `seed`: as in `LLM`, but
    requests without a seed get other seeds than those of other clients. Raises EngineDead if the engine ends.
    """

    def __init__(
        self,
        link: JoinedLink,
        path: Path,
        *,
        generation_config: str,
        seed: int | None,
        table: Sequence[tuple[str, str]],
    ):
        self.path, self.table = path, table
        self.cfg, self.tokenizer = ModelConfig.from_file(path), Tokenizer.from_dir(path)
        self.defaults = read_defaults(generation_config, path)
        eos_ids = self.cfg.eos_token_id if self.defaults.eos_ids is None else self.defaults.eos_ids
        own_seed = None if seed is None else seed + (link.client << 64)
        self.client = Client(link, self.tokenizer, eos_ids=eos_ids, seed=own_seed)
        self.max_model_len = self.client.info.max_model_len

    def hand_over(self) -> Client:
        """As in `LLM`."""
        return self.client


def share(link: Link, folder: str) -> None:
    """Let other processes join an engine, through sockets in this folder, which they can read and write."""
    link.send(Listen(folder))


def forget(link: Link, client: int) -> None:
    """Abort what a client has requested that has ended. Its number must not be used again."""
    link.send(Leave(client))
