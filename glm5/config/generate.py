"""`glm5 generate` and `glm5 chat`: one model, answers on the terminal."""

from typing import Self

from pydantic import model_validator

from glm5.config.command import Count, ModelSource, Sampling
from glm5.config.speculative import EngineFlags


class GenerateConfig(Sampling, EngineFlags, ModelSource):
    """Continue texts, or answer them."""

    more_words = 'texts are given by  --prompt "TEXT"  or on standard input'

    max_num_seqs: Count = 1
    """Requests that run at the same time; here they are sent one by one."""
    prompt: tuple[str, ...] = ()
    """Texts to continue, as they are. Default: what standard input holds."""
    chat: bool = False
    """Treat each text as a user's message and answer it with the chat template."""
    enable_thinking: bool = True
    """With --chat: let the model think before it answers."""

    @model_validator(mode="after")
    def _check_thinking(self) -> Self:
        if "enable_thinking" in self.model_fields_set and not self.chat:
            raise ValueError(
                "--enable-thinking and --no-enable-thinking with --chat; other texts are continued as they are"
            )
        return self


class ChatConfig(Sampling, EngineFlags, ModelSource):
    """Talk with a model in the terminal."""

    max_num_seqs: Count = 1
    """Requests that are answered at the same time; a conversation has one."""
    system: str | None = None
    """A system message that starts the conversation."""
    enable_thinking: bool = True
    """Let the model think before it answers."""
