"""`glm5 key`: what it prints opens what the file says, and a file is never left half right."""

import re
import stat
import tomllib

import pytest

from glm5.cli.main import main
from glm5.cli.serve import read_keys
from glm5.config.serve import ServeConfig
from glm5.serve.keys import KeyRing, read_file


def make(capsys, *argv) -> str:
    assert main(["key", *argv]) == 0
    return capsys.readouterr().out.strip()


def test_keys_that_were_made_are_found(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    alice = make(capsys, "alice", "--file", str(path), "--requests-per-minute", "60", "--cache-salt", "our team")
    boss = make(capsys, "boss", "--file", str(path), "--role", "admin", "--max-concurrency", "4")
    ring = KeyRing(read_file(path))
    found = ring.find(alice)
    assert (found.name, found.role, found.requests_per_minute) == ("alice", "user", 60)
    assert (ring.find(boss).role, ring.find(boss).max_concurrency) == ("admin", 4)
    text = path.read_text()
    assert alice not in text
    assert boss not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_stands_in_the_file_stays(tmp_path, capsys):
    path = tmp_path / "keys.toml"
    make(capsys, "alice", "--file", str(path))
    path.write_text(f"# ours\n{path.read_text()}")
    before = path.read_text()
    make(capsys, "bob", "--file", str(path))
    assert path.read_text().startswith(before)
    assert [key["name"] for key in tomllib.loads(path.read_text())["key"]] == ["alice", "bob"]


@pytest.mark.parametrize(
    ("argv", "code", "message"),
    [
        (["alice"], 1, "API keys: two have the same name, alice"),
        (["a b"], 1, "name: got 'a b'"),
        (["bob", "--cache-salt", "a/b"], 1, "cache_salt: got 'a/b'"),
        (["bob", "--role", "root"], 2, "--role: got 'root'; allowed: 'user', 'metrics' or 'admin'"),
        (["bob", "--max-concurrency", "0"], 2, "--max-concurrency: got '0'; allowed: at least 1"),
    ],
)
def test_what_is_refused_changes_nothing(tmp_path, capsys, argv, code, message):
    path = tmp_path / "keys.toml"
    make(capsys, "alice", "--file", str(path))
    before = path.read_text()
    assert main(["key", *argv, "--file", str(path)]) == code
    captured = capsys.readouterr()
    assert re.sub(r"/\S*keys\.toml\S*", "keys.toml", captured.err).startswith("glm5: error: ")
    assert message in captured.err
    assert captured.out == ""
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.toml"]


def test_keys_of_a_server_come_from_flags_environment_and_file(tmp_path, capsys, monkeypatch):
    path = tmp_path / "keys.toml"
    alice = make(capsys, "alice", "--file", str(path))
    monkeypatch.setenv("GLM5_API_KEY", "one, two,")
    monkeypatch.setenv("GLM5_ADMIN_API_KEY", "boss")
    settings = ServeConfig(model="m", api_key=("zero",), admin_api_key="chief", api_keys_file=str(path))
    ring = read_keys(settings)
    names = {key: ring.find(key).name for key in ("zero", "one", "two", "chief", "boss", alice)}
    assert names == {
        "zero": "key-1",
        "one": "key-2",
        "two": "key-3",
        "chief": "admin-1",
        "boss": "admin-2",
        alice: "alice",
    }
    assert [ring.find(key).role for key in ("zero", "chief", "boss")] == ["user", "admin", "admin"]
    assert ring.find("") is None


def test_a_server_without_keys_needs_none(monkeypatch):
    monkeypatch.delenv("GLM5_API_KEY", raising=False)
    monkeypatch.delenv("GLM5_ADMIN_API_KEY", raising=False)
    ring = read_keys(ServeConfig(model="m"))
    assert (ring.is_needed, ring.has_admin) == (False, False)
    with pytest.raises(ValueError, match="at least 1 character"):
        ServeConfig(model="m", api_key=("",))
