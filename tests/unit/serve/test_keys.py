"""Keys by their hashes: what a file may say, whose a key is, and what keeps callers apart."""

import os

import pytest

from glm5.common.errors import ConfigError
from glm5.serve.http.keys import ANYONE, MAX_FILE_BYTES, KeyRing, Tenant, hash_of, new_key, plain_keys, read_file
from tests.support.serving import key

HASH = hash_of("secret")


def test_a_file_of_keys(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[[key]]\nname = "alice"\nsha256 = "{HASH}"\nrequests_per_minute = 60\nmax_concurrency = 4\n'
        f'[[key]]\nname = "grafana"\nsha256 = "{hash_of("other")}"\nrole = "metrics"\n'
    )
    ring = KeyRing(read_file(path))
    assert (ring.num_users, ring.has_admin, ring.is_needed) == (1, False, True)
    alice = ring.find("secret")
    assert (alice.name, alice.role, alice.requests_per_minute, alice.max_concurrency) == ("alice", "user", 60, 4)
    assert ring.find("other").role == "metrics"
    assert ring.find("Secret") is ring.find("") is ring.find(HASH) is ring.find("\udcff") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[key", "is not TOML"),
        ("a = " + "[" * 100_000, "is not TOML"),
        ("a = " + "9" * 5000, "is not TOML"),
        ("keys = []", "has ['keys']; allowed: [[key]] tables alone"),
        ("[key]\nname = 'a'", "has no list of keys; allowed: [[key]] tables alone"),
        (f"[[key]]\nname = 'a b'\nsha256 = '{HASH}'", "key 1: name: got 'a b'"),
        (f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\nrole = 'root'", "key 1: role: got 'root'"),
        (f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\nrate = 1", "key 1: rate: got 1; allowed: no such key"),
        (f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\nmax_concurrency = 0", "max_concurrency: got 0; allowed: at least 1"),
        (f"[[key]]\nname = 'a'\nsha256 = '{HASH}'\ncache_salt = 'a/b'", "key 1: cache_salt: got 'a/b'"),
        ("[[key]]\nname = 'a'", "key 1: sha256: got 'something else'; allowed: 64 hexadecimal digits"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, text, message):
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("/dev/zero"), "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
        (os.mkdir, "is not a regular file"),
        (lambda path: (path.touch(), os.truncate(path, MAX_FILE_BYTES + 1)), "larger than 16 MiB"),
        (lambda path: path.write_bytes(b"\xff"), "is not TOML: 'utf-8' codec can't decode"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links; allowed: a file of API keys"),
    ],
)
def test_what_is_no_file_of_keys_is_refused_and_nobody_waits(tmp_path, make, message):
    path = tmp_path / "keys.toml"
    make(path)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_key_in_the_place_of_its_hash_is_not_repeated(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text("[[key]]\nname = 'a'\nsha256 = 'my-secret-key'")
    with pytest.raises(ConfigError, match="key 1: sha256: ") as caught:
        read_file(path)
    assert "my-secret-key" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_file(tmp_path / "nowhere.toml")


def test_no_two_keys_are_the_same():
    with pytest.raises(ConfigError, match="two have the same name, a"):
        KeyRing([key("a"), key("b", name="a")])
    with pytest.raises(ConfigError, match=r"two have the same sha256, \['a', 'b'\]"):
        KeyRing([key("a"), key("b", sha256=hash_of("a"))])
    with pytest.raises(ConfigError, match="an API key is empty"):
        plain_keys(["a", " "], "user", "key")


def test_every_key_has_a_salt_of_its_own_unless_it_shares_one():
    names = ["a", "b", "c", "d"]
    ring = KeyRing([key("a"), key("b"), key("c", cache_salt="team"), key("d", cache_salt="team")])
    salts = [ring.find(name).salted("") for name in names]
    assert len({*salts, ANYONE.salted("")}) == 4
    assert salts[2] == salts[3]
    # The same after a restart, for what lies on disk; another one for another key of the same name.
    assert KeyRing([key("a")]).find("a").salt == ring.find("a").salt
    assert KeyRing([key("z", name="a")]).find("z").salt != ring.find("a").salt


def test_no_salt_of_a_request_is_that_of_another_caller():
    tenants = [ANYONE, Tenant("a", "key:1"), Tenant("b", "shared:1"), Tenant("c", "shared:1 x")]
    own = ["", "x", "/x", "key:1", "key:1/x", "x/", "shared:1", "/shared:1/"]
    salted = [tenant.salted(salt) for tenant in tenants for salt in own]
    assert len(set(salted)) == len(salted)


def test_new_keys_are_long_and_different():
    keys = {new_key() for _ in range(20)}
    assert len(keys) == 20
    assert all(len(each) > 40 for each in keys)
