"""JSON schemas of the OpenAPI document for fields that other code checks: messages, tools, choices."""

from pydantic.config import JsonDict

_TEXT: JsonDict = {"type": "string"}
_OBJECT: JsonDict = {"type": "object"}
_TEXT_PART: JsonDict = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
}
_NULL: JsonDict = {"type": "null"}
_CONTENT: JsonDict = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_PART}]}
_CALL: JsonDict = {
    "type": "object",
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string", "minLength": 1}, "arguments": {"anyOf": [_TEXT, _OBJECT]}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
_PROPERTIES: JsonDict = {
    "name": {"type": "string", "minLength": 1},
    "description": _TEXT,
    "parameters": {"type": "object", "examples": [{"type": "object", "properties": {"city": {"type": "string"}}}]},
    "strict": {"type": "boolean"},
}
_FUNCTION: JsonDict = {"type": "object", "properties": _PROPERTIES, "required": ["name"]}

_WORD: JsonDict = {"type": "string", "minLength": 1}
STOP: JsonDict = {"anyOf": [_WORD, {"type": "array", "items": _WORD}, _NULL]}
WORDS: JsonDict = {"items": _WORD}
TOKEN_IDS: JsonDict = {"items": {"type": "integer", "minimum": 0}}

MESSAGES: JsonDict = {
    "examples": [[{"role": "user", "content": "Hello"}]],
    "minItems": 1,
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"role": {"enum": ["system", "developer", "user", "tool"]}, "content": _CONTENT},
                "required": ["role", "content"],
            },
            {
                "type": "object",
                "properties": {
                    "role": {"const": "assistant"},
                    "content": {"anyOf": [_CONTENT, _NULL]},
                    "reasoning_content": {"anyOf": [_TEXT, _NULL]},
                    "tool_calls": {"type": "array", "items": _CALL},
                },
                "required": ["role"],
            },
        ]
    },
}

_INPUT_TEXT: JsonDict = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": _TEXT},
    "required": ["type", "text"],
}
ITEMS: JsonDict = {
    "anyOf": [
        _TEXT,
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {
                            "role": {"enum": ["user", "assistant", "system", "developer"]},
                            "content": {"anyOf": [_TEXT, {"type": "array", "items": _INPUT_TEXT}]},
                        },
                        "required": ["role", "content"],
                    },
                    {
                        "type": "object",
                        "properties": {"type": {"const": "function_call_output"}, "call_id": _TEXT, "output": _TEXT},
                        "required": ["type", "call_id", "output"],
                    },
                    {"type": "object", "properties": {"type": _TEXT}, "required": ["type"]},
                ]
            },
        },
    ],
    "examples": ["Hello"],
}

_BLOCK: JsonDict = {
    "anyOf": [
        _TEXT_PART,
        {
            "type": "object",
            "properties": {"type": {"const": "tool_result"}, "tool_use_id": _TEXT, "content": _TEXT},
            "required": ["type", "tool_use_id"],
        },
        {
            "type": "object",
            "properties": {
                "type": {"const": "tool_use"},
                "id": _TEXT,
                "name": {"minLength": 1, **_TEXT},
                "input": _OBJECT,
            },
            "required": ["type", "id", "name", "input"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "thinking"}, "thinking": _TEXT, "signature": _TEXT},
            "required": ["type", "thinking"],
        },
    ]
}
BLOCK_MESSAGES: JsonDict = {
    "examples": [[{"role": "user", "content": "Hello"}]],
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["user", "assistant", "system"]},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": _BLOCK}]},
        },
        "required": ["role", "content"],
    },
}
TEXT_OR_BLOCKS: JsonDict = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_PART}, _NULL]}
BLOCK_TOOLS: JsonDict = {
    "items": {
        "type": "object",
        "properties": {"name": {"minLength": 1, **_TEXT}, "description": _TEXT, "input_schema": _OBJECT},
        "required": ["name", "input_schema"],
    }
}

TOOLS: JsonDict = {
    "items": {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        "required": ["type", "function"],
    }
}

FUNCTION: JsonDict = {
    **_FUNCTION,
    "properties": {"type": {"const": "function"}, **_PROPERTIES},
    "required": ["type", "name"],
}
NAMESPACE: JsonDict = {
    "type": "object",
    "properties": {
        "type": {"const": "namespace"},
        "name": {"minLength": 1, **_TEXT},
        "description": _TEXT,
        "tools": {"type": "array", "items": FUNCTION},
    },
    "required": ["type", "name", "tools"],
}

TOOL_CHOICE: JsonDict = {
    "anyOf": [
        {"enum": ["auto", "none", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
        {
            "type": "object",
            "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": _OBJECT},
            "required": ["type", "allowed_tools"],
        },
        _NULL,
    ]
}
