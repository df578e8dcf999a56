"""`glm5 key`: what it prints opens what the file says, and a file is never left half right."""

import os
import re
import stat
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor

import pytest

from glm5.cli.main import main
from glm5.cli.serve import read_keys
from glm5.config.serve import ServeConfig
from glm5.serve.http.keys import KeyRing, add_to_file, read_file

NAMES = "1 to 64 letters, digits and . _ @ -"


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
        (["a b"], 2, f"glm5: error: NAME: got 'a b'; allowed: {NAMES}, and ' ' is none of them"),
        ([""], 2, "glm5: error: NAME: got ''; allowed: a text that is not empty"),
        (["x" * 65], 2, "; these are 65"),
        (["bob", "--cache-salt", "a/b"], 2, "glm5: error: --cache-salt: got 'a/b'; allowed: 1 to 64 characters"),
        (["bob", "--cache-salt", "a\x7f"], 2, "and '\\x7f' is none of them"),
        (["bob", "--requests-per-minute", "inf"], 2, "--requests-per-minute: got 'inf'; allowed: at most 1000000000"),
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


def test_keys_made_at_once_are_all_kept(tmp_path):
    path = tmp_path / "keys.toml"
    names = [f"user{number}" for number in range(8)]
    together, counts, is_over = threading.Barrier(len(names) + 1), [], threading.Event()

    def make_one(name):
        together.wait()
        return add_to_file(path, {"name": name})

    def read():
        """As a server does that starts meanwhile."""
        add_to_file(path, {"name": "first"})
        together.wait()
        while not is_over.is_set():
            counts.append(len(read_file(path)))

    with ThreadPoolExecutor(len(names) + 1) as pool:
        reader = pool.submit(read)
        try:
            made = dict(zip(names, pool.map(make_one, names), strict=True))
        finally:
            is_over.set()
        reader.result()
    ring = KeyRing(read_file(path))
    assert {name: ring.find(key).name for name, key in made.items()} == {name: name for name in names}
    assert counts == sorted(counts)
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys.toml"]


@pytest.mark.parametrize(
    ("where", "code", "message"),
    [
        ("pipe", 1, "pipe is not a regular file"),
        (".", 1, "is not a regular file"),
        ("latin1.toml", 1, "latin1.toml is not TOML: 'utf-8' codec can't decode byte 0xe4"),
        ("nowhere/keys.toml", 2, "--file: there is no folder "),
        ("/proc/keys.toml", 1, "/proc/keys.toml: cannot be written ("),
    ],
)
def test_a_file_that_takes_no_key_is_named(tmp_path, capsys, where, code, message):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "latin1.toml").write_bytes(b"# \xe4")
    before = sorted(entry.name for entry in tmp_path.iterdir())
    assert main(["key", "alice", "--file", str(tmp_path / where)]) == code
    assert message in capsys.readouterr().err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == before


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


@pytest.mark.parametrize("key", ["schl\u00fcssel", "my\nkey", " mykey", "mykey ", "mykey\udcff"])
def test_a_key_that_cannot_be_sent_is_refused_at_the_start_and_not_said(monkeypatch, key):
    monkeypatch.delenv("GLM5_API_KEY", raising=False)
    monkeypatch.setenv("GLM5_ADMIN_API_KEY", "b\u00fcro")
    with pytest.raises(ValueError, match=r"API key 1 of the role (user|admin) cannot be sent") as caught:
        read_keys(ServeConfig.model_construct(api_key=(key,), admin_api_key=None, api_keys_file=None))
    assert key not in str(caught.value)
