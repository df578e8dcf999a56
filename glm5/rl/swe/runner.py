"""Runs a package's tests in a box: `python -I -S -B runner.py`, with a request on standard input.

    measure   each test: outcome, seconds, what it said, and the functions of the package that it called
    mutants   the tests are collected once; for each fault a fork changes the code of one function and runs some tests
    grade     some tests in one fork, in which the package is first imported

This process never runs the package's code when it grades. Its forks cannot read it (it is not dumpable), and it
believes only lines of a fork that begin with a nonce made for it.
"""

import ast
import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Tell = Callable[[Any], object]
Items = Mapping[str, Any]
REPO = os.path.abspath("repo") + "/"
MAX_BYTES, MAX_TOLD = 10_000_000, 600
DEATHS = 20  # forks that may end before their last test, in a measurement
# What pytest imports for colours, which nobody sees.
PYGMENTS = [f"pygments{name}" for name in ("", ".formatters", ".formatters.terminal", ".lexer", ".lexers", ".util")]
PYGMENTS += ["pygments.lexers.diff", "pygments.lexers.python"]  # pyright: ignore[reportConstantRedefinition]


class StandIn(types.ModuleType):
    """A module that has whatever is asked of it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


def main() -> None:
    request = json.load(sys.stdin)
    answers = os.dup(1)
    for fd in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    sys.path.append(os.path.abspath("runtime.zip"))
    with open("pytest.ini", "w") as file:
        file.write("[pytest]\n")
    stand_in = [sys.modules.setdefault(name, StandIn(name)) for name in PYGMENTS]
    for name in ("pytest", "pluggy"):  # before the package's folders are on the path
        __import__(name)
    vars(sys.modules["pluggy"])["__version__"] = ""  # the zip file has no metadata
    for module in stand_in:
        del sys.modules[module.__name__]

    def tell(answer: Any) -> None:
        data = memoryview(f"{json.dumps(answer)}\n".encode())
        while data:
            data = data[os.write(answers, data) :]

    if request["do"] == "grade":
        for line in forked(lambda tell: collect(request, lambda items: play(items, tell, request)), request["seconds"]):
            tell(line)
    else:
        work = measure if request["do"] == "measure" else mutants
        collect(request, lambda items: work(items, tell, request))
    os._exit(0)


def collect(request: Mapping[str, Any], work: Callable[[Items], None]) -> None:
    """Call `work` with the tests of the files by their ids, where pytest would run them."""

    class Plugin:
        def pytest_runtestloop(self, session: Any) -> bool:
            work({item.nodeid: item for item in session.items})
            return True

    config = [f"-c{os.path.abspath('pytest.ini')}", "-pno:cacheprovider", "--continue-on-collection-errors"]
    os.chdir("repo")
    sys.path[:0] = [os.path.abspath(path) for path in request["path"]]
    sys.modules["pytest"].main([*config, f"--rootdir={os.getcwd()}", *request["files"]], plugins=[Plugin()])


def forked(work: Callable[[Tell], None], seconds: float) -> list[Any]:
    """What `work(tell)` told in a fork that is ended after `seconds`."""
    nonce, (out, into) = os.urandom(16).hex(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(out)
        try:
            work(lambda line: os.write(into, f"{nonce}{json.dumps(line)}\n".encode()))
        finally:
            os._exit(0)
    os.close(into)
    data, deadline = b"", time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0 and len(data) < MAX_BYTES and select.select([out], [], [], left)[0]:
        if not (piece := os.read(out, 1 << 16)):
            break
        data += piece
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.close(out)
    os.waitpid(pid, 0)
    lines = data.decode(errors="replace").split("\n")[:-1]
    return [json.loads(line[len(nonce) :]) for line in lines if line.startswith(nonce)]


def play(items: Items, tell: Tell, request: Mapping[str, Any]) -> None:
    """Run tests in order; tell the name of each before it, and what came of it after it."""
    chosen = [items[name] for name in request.get("tests") or items if name in items]
    signal.signal(signal.SIGALRM, expired)
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        tell([item.nodeid])
        seen, begun = Seen(), time.monotonic()
        item.config.pluginmanager.register(seen)
        signal.setitimer(signal.ITIMER_REAL, request["test_seconds"])
        try:
            sys.settrace(seen.trace if request.get("is_traced") else None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except BaseException as error:  # noqa: BLE001 - also what the alarm raises
            seen.outcomes.add("failed")
            seen.told.append(type(error).__name__)
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            item.config.pluginmanager.unregister(seen)
        told, seconds = "\n".join(seen.told)[:MAX_TOLD], round(time.monotonic() - begun, 4)
        tell([item.nodeid, seen.outcome(), seconds, told, sorted(seen.called)])


class Seen:
    """What is seen of one test."""

    def __init__(self) -> None:
        self.outcomes, self.told, self.called = set[str](), list[str](), set[tuple[str, int]]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.outcomes.add("skipped" if hasattr(report, "wasxfail") else report.outcome)
        if report.failed:  # the line of the test that failed, and what was wrong there
            lines = str(report.longreprtext).split("\n")
            crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or lines[-1]
            self.told += [*[line[1:].strip() for line in lines if line.startswith(">")][:1], str(crash)]

    def trace(self, frame: types.FrameType, _event: str, _arg: Any) -> None:
        if frame.f_code.co_filename.startswith(REPO):
            self.called.add((frame.f_code.co_filename[len(REPO) :], frame.f_code.co_firstlineno))

    def outcome(self) -> str:
        return "failed" if "failed" in self.outcomes else "passed" if self.outcomes == {"passed"} else "skipped"


def expired(*_: Any) -> None:
    raise TimeoutError("it took too long")


def measure(items: Items, tell: Tell, request: dict[str, Any]) -> None:
    """All tests, with their calls, or without. A test that kills its process fails, and the next go on."""
    for is_traced in request["traced"]:
        left = list(items)
        for _ in range(DEATHS):
            part = request | {"is_traced": is_traced, "tests": left}
            lines = forked(lambda tell, part=part: play(items, tell, part), request["seconds"]) if left else []
            for line in lines:
                if len(line) > 1:
                    tell(line)
            left = left[left.index(lines[-1][0]) + 1 :] if lines else []


def mutants(items: Items, tell: Tell, request: dict[str, Any]) -> None:
    """For each fault, its number and what came of its tests."""
    found: dict[tuple[str, int], list[Any]] = {}
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename.startswith(REPO):
            found.setdefault((each.__code__.co_filename, each.__code__.co_firstlineno), []).append(each)
    gc.freeze()
    for number, fault in request["mutants"]:
        functions = found.get((REPO + fault["path"], fault["first_line"]), [])

        def work(tell: Tell, fault: Any = fault, functions: Any = functions) -> None:
            change(functions, fault)
            play(items, tell, request | {"tests": fault["tests"]})

        tell([number, forked(work, request["seconds"]) if functions else []])


def change(functions: Sequence[Any], fault: Mapping[str, Any]) -> None:
    """Give functions the code that they have in a changed statement of their module. ValueError where they cannot."""
    old = functions[0].__code__
    tree = ast.parse(fault["block"])
    ast.increment_lineno(tree, fault["block_line"] - 1)
    flags = old.co_flags & 0x1FE0000  # those of `from __future__ import`
    codes = [compile(tree, old.co_filename, "exec", flags, dont_inherit=True)]
    while (code := codes.pop()).co_firstlineno != old.co_firstlineno or code.co_name != old.co_name:
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        if not codes:
            raise ValueError("the function is not there")
    for function in functions:
        function.__code__ = code
        if fault["default"]:
            place, text = fault["default"]
            values = list(function.__defaults__)
            values[-place] = ast.literal_eval(text)
            function.__defaults__ = tuple(values)


if __name__ == "__main__":
    main()
