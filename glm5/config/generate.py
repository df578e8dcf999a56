"""`glm5 generate` and `glm5 chat`: one model in the process, answers on the terminal."""

from typing import Annotated

from glm5.config.command import ModelSource, Positional, Sampling


class GenerateConfig(Sampling, ModelSource):
    """Continue prompts as they are, without a chat template."""

    prompts: Annotated[tuple[str, ...], Positional()] = ()
    """Texts to continue; without any, standard input is one."""


class ChatConfig(Sampling, ModelSource):
    """Talk with a model in the terminal."""

    system: str | None = None
    """A system message that starts the conversation."""
    enable_thinking: bool = True
    """Let the model think before it answers."""
