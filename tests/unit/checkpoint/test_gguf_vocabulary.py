"""A checkpoint's tokenizer and chat template in a GGUF, as the package `gguf` reads them."""

import json
from pathlib import Path

import pytest

from glm5.checkpoint.gguf.file import create
from glm5.checkpoint.gguf.vocabulary import add_vocabulary, check_vocabulary
from glm5.common.errors import ConfigError

gguf = pytest.importorskip("gguf", reason="needs the package gguf: pip install 'glm5[gguf]'")

MINI = Path(__file__).parents[3] / "models" / "mini"


def test_tokenizer_and_template(tmp_path):
    """Of models/mini: ids, merges, kinds and roles by its own files."""
    create(tmp_path / "model.gguf", {}, lambda writer: add_vocabulary(writer, MINI, 2050))
    fields = gguf.GGUFReader(tmp_path / "model.gguf").fields
    found = {
        name.removeprefix("tokenizer."): field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.")
    }
    definition = json.loads((MINI / "tokenizer.json").read_text())
    assert found["ggml.model"] == "gpt2"
    assert found["ggml.pre"] == "smollm"
    assert found["ggml.merges"] == [" ".join(pair) for pair in definition["model"]["merges"]]
    tokens = found["ggml.tokens"]
    assert {token: i for i, token in enumerate(tokens[:2012])} == definition["model"]["vocab"]
    assert tokens[2012:2048] == [each["content"] for each in definition["added_tokens"]]
    assert tokens[2048:] == ["[PAD2048]", "[PAD2049]"]
    kinds = {token: gguf.TokenType(kind).name for token, kind in zip(tokens, found["ggml.token_type"], strict=True)}
    picked = ("the", "<|user|>", "[gMASK]", "<think>", "<|image|>", "[PAD2049]")
    assert [kinds.get(token) for token in picked] == [
        "NORMAL",
        "CONTROL",
        "CONTROL",
        "USER_DEFINED",
        "CONTROL",
        "UNUSED",
    ]
    roles = {
        role: tokens[found[f"ggml.{role}_token_id"]] for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    end = "<|endoftext|>"
    assert roles == {
        "bos": "[gMASK]",
        "eos": end,
        "eot": "<|user|>",
        "eom": "<|observation|>",
        "unknown": end,
        "padding": end,
    }
    assert found["ggml.add_bos_token"] is False
    assert found["chat_template"] == (MINI / "chat_template.jinja").read_text()


def with_splitting(folder: Path, pre_tokenizer: dict | None, **more: object) -> Path:
    """A folder with mini's tokenizer that splits text otherwise."""
    folder.mkdir(exist_ok=True)
    definition = json.loads((MINI / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(definition | {"pre_tokenizer": pre_tokenizer, **more}))
    return folder


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GLM = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(pattern: str) -> dict:
    each = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [each, BYTES]}


@pytest.mark.parametrize(
    ("pre_tokenizer", "name"), [(split_by(GLM), "glm4"), (BYTES | {"use_regex": True}, "gpt-2")], ids=["glm4", "gpt-2"]
)
def test_ways_to_split_text_have_names(tmp_path, pre_tokenizer, name):
    folder = with_splitting(tmp_path / "tokenizer", pre_tokenizer)
    create(tmp_path / "model.gguf", {}, lambda writer: add_vocabulary(writer, folder, 2048))
    assert gguf.GGUFReader(tmp_path / "model.gguf").get_field("tokenizer.ggml.pre").contents() == name


def test_tokenizers_that_gguf_cannot_hold_are_refused(tmp_path):
    for pre_tokenizer, more in [
        (split_by(r"\p{N}{1,2}|\p{L}+"), {}),
        (None, {}),
        (split_by(GLM), {"normalizer": {"type": "NFC"}}),
    ]:
        with pytest.raises(ConfigError, match=r"splits text in a way that llama\.cpp has no name for"):
            check_vocabulary(with_splitting(tmp_path / "odd", pre_tokenizer, **more), 2048)
    with pytest.raises(ConfigError, match="has 2048 tokens, and vocab_size is 2047"):
        check_vocabulary(MINI, 2047)
