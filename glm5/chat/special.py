"""Special tokens of the GLM family, by name. Their ids differ between tokenizers, so code looks them up.

The order is that of the published tokenizers, where they follow the vocabulary from id 154820 on.
"""

CONTROL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
)
"""Tokens that shape a prompt. They carry no text: `skip_special` drops them when decoding."""

MARKUP_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
"""Tokens that structure an answer. They stay in decoded text, where parsers look for them."""

GLM_TOKENS = CONTROL_TOKENS + MARKUP_TOKENS

END_OF_TEXT = "<|endoftext|>"
END_TOKENS = (END_OF_TEXT, "<|user|>", "<|observation|>")
"""Tokens that end an answer: the end of text, or the role of the next message (user, or tool results)."""
