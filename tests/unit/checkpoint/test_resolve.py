"""Paths and hub ids: what is downloaded, and what a user reads when it cannot be."""

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from glm5.checkpoint.inspect import inspect
from glm5.checkpoint.load import load
from glm5.checkpoint.resolve import is_hub_id, resolve
from glm5.common.errors import CheckpointError

REPO = "zai-org/GLM-5-FP8"


def response(status):
    return httpx2.Response(status, request=httpx2.Request("GET", f"https://huggingface.co/{REPO}"))


def test_a_directory_is_itself(tmp_path):
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path


def test_a_hub_id_is_downloaded(originals, monkeypatch):
    calls = []

    def download(repo_id, allow_patterns):
        calls.append((repo_id, allow_patterns))
        return str(originals["bf16"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load(REPO).cfg.hidden_size == 64
    ((repo_id, patterns),) = calls
    assert repo_id == REPO
    assert "*.safetensors" in patterns
    assert "*.jinja" in patterns
    assert not [pattern for pattern in patterns if pattern.endswith((".bin", ".py", ".pt"))]


def test_a_directory_wins_over_a_hub_id(tmp_path, monkeypatch):
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("org/name")
    assert resolve("org/name").is_dir()


@pytest.mark.parametrize("path", ["./models/x", "/models/x", "~/models/x", "models", "a/b/c", "../x", "org/"])
def test_paths_are_not_taken_for_hub_ids(path, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # so that ../x is not what someone else has put there
    assert not is_hub_id(path)
    with pytest.raises(CheckpointError, match="no such directory, and not a hub id of the form org/name"):
        resolve(path)


def test_a_file_is_answered_with_its_directory(originals):
    with pytest.raises(CheckpointError, match=r"is a file; give the directory that holds config\.json: .*bf16"):
        resolve(originals["bf16"] / "config.json")


def test_a_name_too_long_for_the_system():
    with pytest.raises(CheckpointError, match=r"x{200}: cannot be read: File name too long"):
        resolve("x" * 5000)


FAILURES = {
    "gated": (errors.GatedRepoError("403", response=response(403)), "is gated: accept its conditions at https://hug"),
    "unknown": (errors.RepositoryNotFoundError("404", response=response(404)), "no such model on the hub .*spelling"),
    "offline": (errors.LocalEntryNotFoundError("not cached"), "no such directory here, no complete download of that"),
    "offline mode": (errors.OfflineModeIsEnabled("offline"), "connect, or give the path of a local copy"),
    "no network": (httpx2.ConnectError("no route"), "the hub cannot be reached"),
    "bad id": (errors.HFValidationError("bad\nid"), "the hub answered: bad; an interrupted download resumes"),
    "server": (errors.HfHubHTTPError("500 Server Error", response=response(500)), "the hub answered: 500 Server Error"),
    "disk full": (OSError(28, "No space left on device"), r"download failed: .*No space left on device; it resumes"),
    "no weights": (errors.NotASafetensorsRepoError("none"), "holds no safetensors weights; only those are read"),
    "bad header": (errors.SafetensorsParsingError("header\nx"), "a shard on the hub has a damaged header: header$"),
    "no config": (errors.RemoteEntryNotFoundError("404 config.json", response=response(404)), "lacks a file .* config"),
}


@pytest.mark.parametrize("kind", FAILURES)
@pytest.mark.parametrize("ask", [resolve, inspect], ids=["resolve", "inspect"])
def test_failures_say_what_to_do(monkeypatch, ask, kind):
    error, message = FAILURES[kind]

    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(CheckpointError, match=message) as raised:
        ask(REPO)
    assert str(raised.value).startswith(REPO)
    assert "\n" not in str(raised.value)


def test_other_errors_pass_through(monkeypatch):
    def fail(*_args, **_kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ZeroDivisionError):
        resolve(REPO)
