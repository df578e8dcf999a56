"""API keys: the tenant of each key, its role, its limits and its cache salt.

    [[key]]                          # a TOML file of keys; it stores hashes only
    name = "alice"
    sha256 = "0f3c..."               # of the key
    role = "user"                    # or "metrics" (may read metrics only), or "admin" (may use all routes)
    requests_per_minute = 60         # this and the next two are optional
    max_concurrency = 4
    cache_salt = "team"              # shares the prefix cache with other keys of the same salt

Keys are long and random, so a plain SHA-256 does not reveal them. Flags and environment variables give keys themselves.
A lock on the file serializes the processes that add keys; a reader sees the file as it was before or after.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from glm5.common.atomic import atomic_write
from glm5.common.bounded import MIB, read_bounded_text
from glm5.common.errors import ConfigError
from glm5.common.exclusive import exclusive
from glm5.config.command import Count
from glm5.config.operations import CacheSalt, KeyName, Rate
from glm5.config.refusal import first_error, refuse

Role = Literal["user", "metrics", "admin"]
MAX_FILE_BYTES = 16 * MIB  # tens of thousands of keys
# Characters that are safe in a header: HTTP clients encode others differently, or refuse to send them.
_SENDABLE = re.compile(r"[!-~]([ -~]*[!-~])?")


class Key(BaseModel):
    """One key, by its hash."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: KeyName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    role: Role = "user"
    requests_per_minute: Rate | None = None
    max_concurrency: Count | None = None
    cache_salt: CacheSalt | None = None


@dataclass(frozen=True)
class Tenant:
    """The owner of requests. Tenants of one `salt` share cached prefixes. A limit of None is the server's default."""

    name: str = ""
    salt: str = ""
    role: Role = "user"
    requests_per_minute: float | None = None
    max_concurrency: int | None = None

    def salted(self, own: str) -> str:
        """The cache salt of a request that has its `own` one: never equal to another tenant's."""
        return f"{self.salt}/{own}" if self.salt or own else ""


ANYONE = Tenant()
"""The tenant of all requests to a server without keys."""


def hash_of(key: str) -> str:
    """The hash under which a key is stored."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def new_key() -> str:
    """A random key of 256 bits."""
    return f"glm5-{secrets.token_urlsafe(32)}"


def plain_keys(keys: Sequence[str], role: Role, prefix: str) -> list[Key]:
    """Entries for keys given in plain text. Raises ConfigError for an invalid one, without showing it."""
    for number, key in enumerate(keys, start=1):
        if not key.strip():
            raise ConfigError(f"an API key is empty; allowed: any text, such as {new_key()}")
        if not _SENDABLE.fullmatch(key):
            raise ConfigError(
                f"API key {number} of the role {role} cannot be sent in a header: it has a character that is not "
                f"printable ASCII, or a space at an end; allowed: printable ASCII, such as {new_key()}"
            )
    return [Key(name=f"{prefix}-{number}", sha256=hash_of(key), role=role) for number, key in enumerate(keys, start=1)]


def read_file(path: Path) -> list[Key]:
    """The keys of a file. Raises ConfigError, whose message never contains a key."""
    return _parse(_text_of(path), path)


def _text_of(path: Path) -> str:
    try:
        return read_bounded_text(path, MAX_FILE_BYTES, ConfigError)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; allowed: a file of API keys (glm5 key NAME makes one)") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _parse(text: str, path: Path) -> list[Key]:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of too many digits
        raise ConfigError(f"{path} is not TOML: {error}") from None
    entries = content.pop("key", [])
    if content or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{path} has {sorted(content) or 'no list of keys'}; allowed: [[key]] tables alone")
    keys: list[Key] = []
    for number, entry in enumerate(entries, start=1):
        try:
            keys.append(Key.model_validate(entry))
        except ValidationError as error:
            where, value, allowed = first_error(error)
            if where == ("sha256",):  # perhaps the key itself
                value, allowed = "something else", "64 hexadecimal digits, the SHA-256 of the key"
            raise refuse(f"{path}: key {number}: {'.'.join(where)}", value, allowed) from None
    return keys


def add_to_file(path: Path, fields: Mapping[str, Any]) -> str:
    """Create a key, and add its hash with these fields to a file, which only its owner may read. Returns the key.
    Raises ConfigError, and then leaves the file unchanged."""
    try:
        with exclusive(path):
            return _add(path, fields)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another with --file") from None


def _add(path: Path, fields: Mapping[str, Any]) -> str:
    key = new_key()
    before = _text_of(path) if path.exists() else ""
    # JSON's syntax of texts and numbers is also valid TOML.
    written = {**fields, "sha256": hash_of(key)}.items()
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in written]
    text = before + "\n".join(["", "[[key]]", *lines, ""])
    KeyRing(_parse(text, path))
    with atomic_write(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(text)
    return key


class KeyRing:
    """All keys of a server. Raises ConfigError for a name or a key that occurs twice."""

    def __init__(self, keys: Sequence[Key] = ()):
        for what in ("name", "sha256"):
            seen = [getattr(key, what) for key in keys]
            if twice := next((value for value in seen if seen.count(value) > 1), None):
                named = twice if what == "name" else [key.name for key in keys if key.sha256 == twice]
                raise ConfigError(f"API keys: two have the same {what}, {named}; allowed: each once")
        self.keys = list(keys)
        self._tenants = [(bytes.fromhex(key.sha256), _tenant(key)) for key in keys]
        roles = [key.role for key in keys]
        self.has_admin = "admin" in roles
        self.num_users = roles.count("user")
        self.is_needed = self.num_users > 0 or "metrics" in roles

    def find(self, key: str) -> Tenant | None:
        """The tenant of a key; None for an unknown key. Takes constant time, whatever the key."""
        digest, found = bytes.fromhex(hash_of(key)), None
        for known, tenant in self._tenants:
            if hmac.compare_digest(digest, known):
                found = tenant
        return found


def _tenant(key: Key) -> Tenant:
    # Derived from the key, not from its name: a new key of an old name gets none of the old tenant's cache.
    own = hashlib.blake2b(bytes.fromhex(key.sha256), digest_size=16, person=b"glm5 cache salt").hexdigest()
    salt = f"key:{own}" if key.cache_salt is None else f"shared:{key.cache_salt}"
    return Tenant(key.name, salt, key.role, key.requests_per_minute, key.max_concurrency)
