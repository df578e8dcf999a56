"""A package with tests: what of a source distribution is program, test or other.

Tests stand in folders called test or tests, or are called test_*.py, *_test.py or conftest.py. A policy sees only
the program. Its changes count in .py files of the program only; everything else is as the package had it.
"""

import re
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from glm5.common.errors import ConfigError

MAX_FILES, MAX_BYTES, MAX_FILE = 5_000, 60_000_000, 4_000_000
_TEST = re.compile(r"(^|/)(tests?|testing)/|(^|/)(test_[^/]*|[^/]*_tests?|conftest|tests?)\.py$")
_COLLECTED = re.compile(r"(^|/)(test_[^/]*|[^/]*_tests?|tests?)\.py$")
_NO_PROGRAM = re.compile(r"^(docs?|examples?|benchmarks?|bench|tools|scripts|setup\.py|tasks\.py|noxfile\.py)(/|$)")


def read_source(source: Path) -> dict[str, bytes]:
    """The files of a folder or a .tar.gz by their paths below its top folder. Raises ConfigError, OSError."""
    files: dict[str, bytes] = {}
    size = 0
    try:
        for path, content in _entries(source):
            size += len(content)
            if len(files) >= MAX_FILES or size > MAX_BYTES:
                raise ConfigError(f"{source}: more than {MAX_FILES} files or {MAX_BYTES} bytes; give a smaller package")
            files[path] = content
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise ConfigError(f"{source}: {error}; allowed: a folder, or a .tar.gz of one") from None
    return files


def _entries(source: Path) -> Iterator[tuple[str, bytes]]:
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file() and not path.is_symlink():
                yield _checked(path.relative_to(source).as_posix(), path.stat().st_size, path.read_bytes)
        return
    with tarfile.open(source, "r:gz") as archive:
        for member in archive:
            if member.isfile() and "/" in member.name:
                content = archive.extractfile(member)
                assert content is not None
                yield _checked(member.name.partition("/")[2], member.size, content.read)


def _checked(path: str, size: int, read: Callable[[], bytes]) -> tuple[str, bytes]:
    if ".." in PurePosixPath(path).parts or path.startswith("/"):
        raise ConfigError(f"{path!r:.80} leads out of its folder")
    return path, read() if size <= MAX_FILE and not path.endswith((".pyc", ".so")) else b""


def is_test(path: str) -> bool:
    return _TEST.search(path) is not None


def roots(files: Mapping[str, bytes]) -> list[str]:
    """Folders to import from: the one with the program, then the top."""
    inside = next(
        (top for top in ("src", "lib") if any(re.match(rf"{top}/[^/]+(/__init__)?\.py$", f) for f in files)), ""
    )
    return list(dict.fromkeys([inside or ".", "."]))


def packages(files: Mapping[str, bytes]) -> list[str]:
    """Folders of packages, with a slash, and files of modules: what can be imported, without tests."""
    top = re.escape(roots(files)[0].replace(".", ""))
    found = [re.match(rf"({top}/?)([^/]+/(?=__init__\.py$)|[^/]+\.py$)", path) for path in files if not is_test(path)]
    return sorted(each[0] for each in found if each and not _NO_PROGRAM.match(each[2]))


def program(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of packages and modules that can be imported, without tests."""
    tops = tuple(packages(files))
    return {path: content for path, content in files.items() if path.startswith(tops) and not is_test(path)}


def test_files(files: Mapping[str, bytes]) -> list[str]:
    """What pytest collects."""
    return sorted(path for path in files if _COLLECTED.search(path))
