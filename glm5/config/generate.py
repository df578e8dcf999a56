"""`glm5 generate` and `glm5 chat`: one model in the process, answers on the terminal."""

from glm5.config.command import ModelSource, Sampling


class GenerateConfig(Sampling, ModelSource):
    """Continue texts, or answer them."""

    prompt: tuple[str, ...] = ()
    """Texts to continue, as they are. Default: what standard input holds."""
    chat: bool = False
    """Take each text for a user's message and answer it, through the chat template."""


class ChatConfig(Sampling, ModelSource):
    """Talk with a model in the terminal."""

    system: str | None = None
    """A system message that starts the conversation."""
    enable_thinking: bool = True
    """Let the model think before it answers."""
