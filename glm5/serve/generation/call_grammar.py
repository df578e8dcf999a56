"""The grammar of tool calls, for requests that require a call or have strict tools.

    call = <tool_call> name (<arg_key> key </arg_key> <arg_value> value </arg_value>)* </tool_call>

It uses xgrammar's structural tags. A tag is one special token, as in the parser, so text in a value cannot end it.
Arguments come in the order of the schema's properties. Optional ones may be left out, unlisted ones are not allowed.
Strings are written as they are, other values as JSON, as the parser reads them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from glm5.chat.parser import CALL, CALL_END, KEY, KEY_END, TAGS, VALUE, VALUE_END, HasTokens
from glm5.common.budget import Budget, least_chars
from glm5.common.errors import RequestError
from glm5.serve.generation.value_grammar import ANY_TEXT, NOTHING, ValueGrammar, concat, either, grammar_budget, maybe

Format = dict[str, Any]


class CallGrammar:
    """Builds grammars for one tokenizer. Raises RequestError if it has no tokens for the tags of calls."""

    def __init__(self, tokenizer: HasTokens) -> None:
        self._ids = {tag: token_id for tag in TAGS if (token_id := tokenizer.id_of(tag)) is not None}
        if len(self._ids) < len(TAGS):
            raise RequestError("this model's tokenizer has no tokens for tool calls: they cannot be enforced", "tools")

    def calls(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, strict: bool) -> Format:
        """One call, or with `parallel` one or more, and nothing else. `strict`: treat every tool as strict, not only
        those with `"strict": true`."""
        call = self._call(tools, strict=strict)
        return {"type": "plus", "content": call} if parallel else call

    def text_with_calls(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Format:
        """Any text with calls in it. Only calls of strict tools are constrained to their schemas."""
        return {
            "type": "token_triggered_tags",
            "trigger_tokens": [self._ids[CALL]],
            "tags": [self._call(tools, strict=False)],
            "exclude_tokens": [token_id for tag, token_id in self._ids.items() if tag != CALL],
            "stop_after_first": not parallel,
        }

    def _call(self, tools: Sequence[Mapping[str, Any]], *, strict: bool) -> Format:
        functions, budget = [tool["function"] for tool in tools], grammar_budget()
        bodies = [
            concat(
                _text(function["name"]),
                self._arguments(function, budget, strict=strict or bool(function.get("strict"))),
            )
            for function in functions
        ]
        return {"type": "tag", "begin": self._tag(CALL), "content": either(bodies), "end": self._tag(CALL_END)}

    def _arguments(self, function: Mapping[str, Any], budget: Budget, *, strict: bool) -> Format:
        """The grammar of a function's arguments: any arguments if it is not strict."""
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        free = {"type": "star", "content": self._pair(ANY_TEXT, ANY_TEXT)}
        owner, exact = f"the parameters of {function['name']!r:.60}", bool(function.get("strict"))
        budget.spend(least_chars(function["name"], budget.most), owner)
        if not strict:
            budget.spend(least_chars(free, budget.most), owner)
            return free
        values = ValueGrammar(schema, owner, budget, exact=exact)
        ways = values.objects()
        if ways is None:
            return free
        return either([self._object(way, values, budget) for way in ways])

    def _object(self, schema: Mapping[str, Any], values: ValueGrammar, budget: Budget) -> Format:
        properties, required = schema.get("properties") or {}, dict.fromkeys(schema.get("required") or ())
        rest = schema.get("additionalProperties", False)
        names = [*properties, *(name for name in required if name not in properties)]
        empty = least_chars(self._pair(_text(""), NOTHING), budget.most)
        budget.spend(sum(empty + least_chars(name, budget.most) for name in names), values.owner)
        if not names and rest is not False:  # a map
            value = ANY_TEXT if rest is True else values.value(rest)
            return {"type": "star", "content": self._pair(ANY_TEXT, value)}
        pairs = [(name, self._pair(_text(name), values.value(properties.get(name, {})))) for name in names]
        return concat(*(pair if name in required else maybe(pair) for name, pair in pairs))

    def _pair(self, key: Format, value: Format) -> Format:
        return concat(self._tag(KEY), key, self._tag(KEY_END), self._tag(VALUE), value, self._tag(VALUE_END))

    def _tag(self, tag: str) -> Format:
        return {"type": "token", "token": self._ids[tag]}


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}
