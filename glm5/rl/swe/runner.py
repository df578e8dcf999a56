"""Runs a package's tests in a box: `python -I -S -B runner.py`, with a request on standard input, answers on its output.

    measure   each test: outcome, seconds, and the functions of the package that it called
    mutants   the tests are collected once; for each fault a fork changes the code of one function and runs some tests
    grade     some tests in one fork, in which the package is first imported

Only forks run the package's code when something is decided. This process cannot be read by them (it is not dumpable),
and believes lines of a fork only after a nonce that it made for it.
"""

import ast
import ctypes
import gc
import json
import os
import select
import signal
import sys
import time
import types

MAX_LINE, MAX_TOLD = 10_000_000, 600
DEATHS = 20  # forks that may end before their last test, in a measurement


def main():
    request = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    for fd in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), fd)
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
    sys.path.append(os.path.abspath("runtime.zip"))
    with open("pytest.ini", "w") as file:
        file.write("[pytest]\n")
    stand_in = [sys.modules.setdefault(name, StandIn(name)) for name in PYGMENTS]  # for colours, which nobody sees
    import pluggy
    import pytest  # noqa: F401  before the package's folders are on the path

    pluggy.__version__ = ""  # the zip file has no metadata

    for module in stand_in:
        del sys.modules[module.__name__]
    tell = lambda answer: print(json.dumps(answer), file=answers, flush=True)  # noqa: E731
    if request["do"] == "grade":
        for line in forked(lambda tell: collect(request, lambda items: play(items, tell, request)), request["seconds"]):
            tell(line)
    else:
        work = measure if request["do"] == "measure" else mutants
        collect(request, lambda items: work(items, tell, request))
    answers.flush()
    os._exit(0)


PYGMENTS = ["pygments", "pygments.formatters", "pygments.formatters.terminal", "pygments.lexer", "pygments.lexers"]
PYGMENTS += ["pygments.lexers.diff", "pygments.lexers.python", "pygments.util"]


class StandIn(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Exception,), {})


def collect(request, work):
    """Call `work` with the tests of the files by their ids, where pytest would run them."""
    import pytest

    class Plugin:
        def pytest_runtestloop(self, session):
            work({item.nodeid: item for item in session.items})
            return True

    config = [f"-c{os.path.abspath('pytest.ini')}", "-pno:cacheprovider", "--continue-on-collection-errors"]
    os.chdir("repo")
    sys.path[:0] = [os.path.abspath(path) for path in request["path"]]
    pytest.main([*config, f"--rootdir={os.getcwd()}", *request["files"]], plugins=[Plugin()])


def forked(work, seconds):
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
    while (left := deadline - time.monotonic()) > 0 and len(data) < MAX_LINE and select.select([out], [], [], left)[0]:
        piece = os.read(out, 1 << 16)
        if not piece:
            break
        data += piece
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.close(out)
    os.waitpid(pid, 0)
    lines = data.decode(errors="replace").split("\n")[:-1]
    return [json.loads(line[len(nonce) :]) for line in lines if line.startswith(nonce)]


def play(items, tell, request):
    """Run tests in order; tell the name of each before and its outcome after it."""
    wanted = request.get("tests") or list(items)
    chosen = [items[name] for name in wanted if name in items]
    for place, item in enumerate(chosen):
        tell([item.nodeid])
        outcome, told, called = {}, {}, set()

        def logged(report, outcome=outcome, told=told):
            outcome[report.when] = report.outcome if not hasattr(report, "wasxfail") else "skipped"
            if report.failed:
                told[report.when] = said(report)

        def trace(frame, _event, _arg, called=called):
            if frame.f_code.co_filename.startswith(HERE):
                called.add((frame.f_code.co_filename[len(HERE) :], frame.f_code.co_firstlineno))

        begun, plugin = time.monotonic(), types.SimpleNamespace(pytest_runtest_logreport=logged)
        item.config.pluginmanager.register(plugin)
        signal.signal(signal.SIGALRM, expired)
        signal.setitimer(signal.ITIMER_REAL, request["test_seconds"])
        try:
            if request.get("is_traced"):
                sys.settrace(trace)
            following = chosen[place + 1] if place + 1 < len(chosen) else None
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        except BaseException as error:  # noqa: BLE001 - also what the alarm raises
            outcome["call"], told["call"] = "failed", type(error).__name__
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            item.config.pluginmanager.unregister(plugin)
        parts = set(outcome.values())
        ended = "failed" if "failed" in parts else "passed" if parts == {"passed"} else "skipped"
        tell(
            [
                item.nodeid,
                ended,
                round(time.monotonic() - begun, 4),
                "\n".join(told.values())[:MAX_TOLD],
                sorted(called),
            ]
        )


HERE = os.path.abspath("repo") + "/"


def expired(*_):
    raise TimeoutError("it took too long")


def said(report):
    """The line of the test that failed, and what was wrong there."""
    lines = str(report.longreprtext).split("\n")
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", "") or (lines[-1] if lines else "")
    marked = [line[1:].strip() for line in lines if line.startswith(">")]
    return "\n".join([*marked[:1], str(crash)])


def measure(items, tell, request):
    """All tests, twice: with their calls, then with their time. What kills its process fails, and the next go on."""
    tell({"collected": len(items)})
    for is_traced in request["traced"]:
        left = list(items)
        for _ in range(DEATHS):
            part = request | {"is_traced": is_traced, "tests": left}
            lines = forked(lambda tell, part=part: play(items, tell, part), request["seconds"])
            for line in lines:
                if len(line) > 1:
                    tell(line)
            if not lines or lines[-1][0] == left[-1]:
                break
            left = left[left.index(lines[-1][0]) + 1 :]


def mutants(items, tell, request):
    """For each fault, its number and the outcomes of its tests."""
    found = {}
    for each in gc.get_objects():
        if type(each) is types.FunctionType and each.__code__.co_filename.startswith(HERE):
            code = each.__code__
            found.setdefault((code.co_filename, code.co_firstlineno), []).append(each)
    gc.freeze()
    for number, fault in request["mutants"]:
        functions = found.get((HERE + fault["path"], fault["first_line"]), [])

        def work(tell, fault=fault, functions=functions):
            change(functions, fault)
            play(items, tell, request | {"tests": fault["tests"]})

        tell([number, forked(work, request["seconds"]) if functions else []])


def change(functions, fault):
    """Give functions the code that they have in a changed statement of their module. ValueError where they cannot."""
    old = functions[0].__code__
    tree = ast.parse(fault["block"])
    ast.increment_lineno(tree, fault["block_line"] - 1)
    flags = old.co_flags & 0x1FE0000  # those of `from __future__ import`
    codes = [compile(tree, old.co_filename, "exec", flags, dont_inherit=True)]
    while codes:
        code = codes.pop()
        if code.co_firstlineno == old.co_firstlineno and code.co_name == old.co_name:
            break
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    else:
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
