"""Renders conversations into prompts, with a checkpoint's own chat template or a bundled one.

Which template: `--chat-template` (a bundled name or a file), else the checkpoint's `chat_template.jinja`,
else `chat_template` in its `tokenizer_config.json`, else a bundled one: GLM-5.2's where the
configuration shares indices between layers, else GLM-5.1's.
"""

import os
from collections.abc import Sequence
from functools import cache, cached_property, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from glm5.chat.guard import Guard, Spellings
from glm5.chat.message import MEDIA_PARTS, Message, normalize_messages, normalize_tools
from glm5.chat.rendering import InProcessTemplate, Renderer, TemplateFailure, WorkerTemplate
from glm5.chat.tokenizer import Tokenizer, read_json
from glm5.common.bounded import MIB, read_bounded_text
from glm5.common.errors import CheckpointError, ConfigError, RequestError

BUNDLED = ("glm-5", "glm-5.1", "glm-5.2", "glm-5.3")
_SWITCHES = ("enable_thinking", "clear_thinking")
MAX_SOURCE = MIB
"""Bytes of a template's file, and characters of a template; the published ones have 5,000."""


class ChatTemplate:
    """A template and the tokenizer that its prompts are encoded with.

    `name`: printed at start. `source`: the jinja text, to be saved with a checkpoint. `always_thinks`: the template
    cannot switch thinking off (GLM-5.3). `is_ours`: it is a bundled one. `allow_control_tokens`: special tokens that
    messages spell become these tokens, as in engines that encode a rendered prompt; without it they stay plain text.
    """

    def __init__(
        self, source: str, name: str, tokenizer: Tokenizer | None = None, *, allow_control_tokens: bool = False
    ) -> None:
        """Raises CheckpointError naming the line when `source` is not a template."""
        self.source, self.name, self.tokenizer = source, name, tokenizer
        if len(source) > MAX_SOURCE:
            raise CheckpointError(f"chat template {name} has {len(source)} characters; allowed: {MAX_SOURCE}")
        try:
            # Savers drop the last newline.
            self.is_ours = source.rstrip() in [known.rstrip() for known in _bundled_sources()]
            ours = partial(InProcessTemplate, is_ours=True)
            self._renderer: Renderer = (ours if self.is_ours else WorkerTemplate)(source)
        except TemplateFailure as failure:
            raise CheckpointError(f"chat template {name}{failure}") from failure
        self.allow_control_tokens = allow_control_tokens
        self.always_thinks = "Reasoning Effort:" in source and "enable_thinking" not in source

    @classmethod
    def bundled(cls, name: str, tokenizer: Tokenizer | None = None, *, allow_control_tokens: bool = False) -> Self:
        """A bundled template: "glm-5", "glm-5.1", "glm-5.2" or "glm-5.3"."""
        if name not in BUNDLED:
            raise ConfigError(f"chat template {name!r}: allowed: {', '.join(BUNDLED)}")
        return cls(_bundled_sources()[BUNDLED.index(name)], name, tokenizer, allow_control_tokens=allow_control_tokens)

    @classmethod
    def for_checkpoint(
        cls,
        path: str | os.PathLike[str] | None,
        cfg_shares_indices: bool = False,
        override: str | None = None,
        tokenizer: Tokenizer | None = None,
        *,
        allow_control_tokens: bool = False,
    ) -> Self:
        """The template for a checkpoint folder (None: a model without files), selected as the module docstring says.

        The tokenizer is read from the folder if it is not given. `override` is a bundled name, with or
        without "glm-", or a file; anything else is a ConfigError.
        """
        if tokenizer is None and path is not None:
            tokenizer = Tokenizer.from_dir(path)
        source, name = _found(path, override, "glm-5.2" if cfg_shares_indices else "glm-5.1")
        if source is None:
            return cls.bundled(name, tokenizer, allow_control_tokens=allow_control_tokens)
        return cls(source, name, tokenizer, allow_control_tokens=allow_control_tokens)

    def render(
        self,
        /,  # `self` is a name that a request may give its own keyword, too
        messages: Any,
        tools: Any = None,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation, as text.

        `kwargs` are the `chat_template_kwargs` of a request: `enable_thinking` (or `thinking`),
        `clear_thinking`, `reasoning_effort`, and other variables of the template; None counts as not
        given. Raises RequestError with the offending `param`.
        """
        unmarked = Guard(self.tokenizer, None)
        return self.render_marked(unmarked, messages, tools, add_generation_prompt=add_generation_prompt, **kwargs)

    def guard(self) -> Guard:
        """A guard for `render_marked`: one per prompt, or for prompts that are compared. Needs the tokenizer."""
        if self.tokenizer is None:
            raise ConfigError(f"chat template {self.name} has no tokenizer to encode with: give one")
        return Guard(self.tokenizer, None if self.allow_control_tokens else self._spellings)

    def render_marked(
        self, guard: Guard, /, messages: Any, tools: Any = None, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt with marks in its input texts, for `guard.encode`. It may be split before encoding."""
        chat = normalize_messages(messages)
        options = self._options(kwargs)
        self._check_media(chat)
        if self.always_thinks and options.get("enable_thinking") is False:
            raise RequestError(
                f"enable_thinking=false: the chat template {self.name} always thinks; "
                'ask for less with reasoning_effort="low"',
                "enable_thinking",
            )
        chat, tools, values = guard.marked([chat, normalize_tools(tools), list(options.values())])
        try:
            return self._render(chat, tools, add_generation_prompt, dict(zip(options, values, strict=True)))
        except RequestError as error:  # the message may quote marked input
            raise RequestError(guard.text(str(error)), error.param) from error

    def encode(
        self, /, messages: Any, tools: Any = None, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """The prompt of a conversation, as token ids."""
        guard = self.guard()
        prompt = self.render_marked(guard, messages, tools, add_generation_prompt=add_generation_prompt, **kwargs)
        return guard.encode(prompt)

    @cached_property
    def _spellings(self) -> Spellings:
        assert self.tokenizer is not None
        return Spellings(self.tokenizer.control_spellings)

    def starts_in_reasoning(self, /, prompt: str | Sequence[int] | None = None, **kwargs: Any) -> bool:
        """Whether the answer to `prompt` (text or ids) begins inside reasoning: its last think tag opens.

        Without a prompt: the answer for requests with these keywords. A template that always thinks ignores
        them.
        """
        if prompt is None:
            options = self._options(kwargs)
            prompt = self._render([{"role": "user", "content": ""}], None, True, options)  # noqa: FBT003
        return ends_in_reasoning(prompt, self.tokenizer)

    def _options(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        options = {key: value for key, value in kwargs.items() if value is not None}
        if "thinking" in options:
            options.setdefault("enable_thinking", options["thinking"])
        for key in _SWITCHES:
            if key in options and not isinstance(options[key], bool):
                raise RequestError(f"{key} must be true or false, got {options[key]!r:.60}", key)
        effort = options.get("reasoning_effort", "")
        if not isinstance(effort, str):
            raise RequestError(f"reasoning_effort must be text such as 'high', got {effort!r:.60}", "reasoning_effort")
        if taken := sorted({"messages", "tools", "add_generation_prompt"} & options.keys()):
            raise RequestError(f"chat_template_kwargs may not hold {taken[0]}: it has a field of its own", taken[0])
        return options

    def _check_media(self, chat: list[Message]) -> None:
        """Refuse media, which GLM-5 cannot read. GLM-5.3's template describes media parts, the others drop them."""
        if "image" in self.source:
            return
        for i, message in enumerate(chat):
            if isinstance(message["content"], str):
                continue
            kinds = [part.get("type") for part in message["content"] if isinstance(part, dict)]
            if media := [kind for kind in kinds if kind in MEDIA_PARTS]:
                raise RequestError(
                    f"messages[{i}].content has a part of type {media[0]}: this model reads text only",
                    f"messages[{i}].content",
                )

    def _render(
        self, chat: list[Message], tools: list[dict[str, Any]] | None, generate: bool, options: dict[str, Any]
    ) -> str:
        names = {} if self.tokenizer is None else self.tokenizer.settings
        special = {
            key: names[key] for key in ("bos_token", "eos_token", "pad_token") if isinstance(names.get(key), str)
        }
        variables = special | options | {"messages": chat, "tools": tools, "add_generation_prompt": generate}
        try:
            return self._renderer.render(variables)
        except TemplateFailure as failure:
            raise RequestError(f"the chat template {self.name}{failure}", "messages") from failure


def ends_in_reasoning(prompt: str | Sequence[int], tokenizer: Tokenizer | None = None) -> bool:
    """Whether the last think tag of `prompt` opens. Ids need the tokenizer. Without a tag there is no reasoning."""
    if isinstance(prompt, str):
        return prompt.rfind("<think>") > prompt.rfind("</think>")
    if tokenizer is None:
        raise ValueError("token ids cannot be searched for think tags without their tokenizer: give one")
    opening, closing = tokenizer.id_of("<think>"), tokenizer.id_of("</think>")
    if opening is None or closing is None:
        return ends_in_reasoning(tokenizer.decode(prompt))
    return next((token_id == opening for token_id in reversed(prompt) if token_id in (opening, closing)), False)


@cache
def _bundled_sources() -> tuple[str, ...]:
    folder = files("glm5.chat") / "templates"
    return tuple((folder / f"{name}.jinja").read_text(encoding="utf-8") for name in BUNDLED)


def _found(path: str | os.PathLike[str] | None, override: str | None, default: str) -> tuple[str | None, str]:
    """Source and name of the template; no source for a bundled one."""
    if override is None:
        own = _own_template(Path(path)) if path is not None else None
        return own if own is not None else (None, default)
    name = override if override.startswith("glm-") else f"glm-{override}"
    if name in BUNDLED:
        return None, name
    if not Path(override).is_file():
        raise ConfigError(f"chat_template: got {override!r}; allowed: {', '.join(BUNDLED)}, or a file that exists")
    return _read(Path(override)), override


def _own_template(folder: Path) -> tuple[str, str] | None:
    """Source and name of the checkpoint's own template, or None."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read(file), file.name
    settings = folder / "tokenizer_config.json"
    template = read_json(settings).get("chat_template")
    if isinstance(template, list):  # several by name
        named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named[0].get("template") if named else None
    return (template, settings.name) if isinstance(template, str) else None


def _read(file: Path) -> str:
    try:
        return read_bounded_text(file, MAX_SOURCE)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"chat template {file} cannot be read: {error}") from error
