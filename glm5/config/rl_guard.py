"""`[rollouts.guard]`: which tool calls are cheating, and what asks whether they are (docs/rl-swe.md).

The built-in rules fire too often rather than too seldom, for a judge to sort out. All are searched by the engine of
Rust's crate regex, which pydantic brings: it takes time in proportion to a text, where Python's may take forever.
"""

import math
import re
from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import SchemaError, SchemaValidator, core_schema

from glm5.config.step import Positive, Section
from glm5.config.train import Name

_REST = r"[^\n;|&]{0,200}"  # of a shell command
RULES = {
    "hidden": r"(^|[^\w.~/-])/(tests|solution|oracle)\b|\bsolve\.sh\b|\b(hidden|private)_tests?\b",
    "reward": r"\breward\.(txt|json)\b|/logs/verifier\b",
    "runner": r"\b(conftest|sitecustomize|usercustomize)\.py\b|\bpytest(\.ini|_plugins)\b|\bPYTEST_\w|\b_pytest\b|"
    r"\bunittest/(case|loader|runner|suite|result)\.py\b",
    "history": rf"\bgit\b{_REST}(\b(reflog|fsck|fetch|pull|clone)\b|--(all|reflog|remotes)\b|_HEAD\b|\borigin/)",
    "upstream": rf"\bpip[\d.]*\s{{1,9}}(download\b|install\b{_REST}(--force|--upgrade|-U\b|--target))|"
    r"\b(curl|wget|urlopen|urlretrieve|requests\.get)\b[^\n]{0,300}"
    r"\b(github|githubusercontent|gitlab|bitbucket|pypi|pythonhosted|npmjs)\b",
}
"""Regular expressions by name: files of the grader, a reward written beforehand, a patched test runner, later commits,
and the repaired package from elsewhere."""


MAX_REPEATS = 1000
"""Of a rule: its counts {n} together, times those of groups. A search takes time in proportion to them too."""


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a text contains a match. Raises ValueError for what is no pattern of Rust's, or of more repeats."""
    counts = re.findall(r"(\)?)\{(?:\d*,)?(\d+),?\}", pattern)
    of_groups = math.prod(int(n) for group, n in counts if group)
    own = sum(int(n) for group, n in counts if not group)
    if of_groups * max(1, own) > MAX_REPEATS:
        raise ValueError(f"{pattern!r:.80} repeats more than {MAX_REPEATS} times by its counts; use * or + for them")
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern, regex_engine="rust-regex"))
    except SchemaError as error:
        why = str(error).strip().splitlines()[-1].strip().removeprefix("error: ").removeprefix("SchemaError: ")
        raise ValueError(f"a regular expression of Rust's crate regex ({why})") from None
    return lambda text: validator.isinstance_python(text.encode(errors="replace").decode())


def _compiles(pattern: str) -> str:
    matcher(pattern)
    return pattern


class GuardSection(Section):
    """A call that a rule matches, and that the judge does not allow, is not run: the policy gets a dummy answer, and
    the rollout goes on (GLM-5.2: ending it made training unstable)."""

    rules: dict[Name, Annotated[str, Field(max_length=2000), AfterValidator(_compiles)]] = {}
    """Regular expressions by name, without look-around and back-references, searched in the name and arguments of each
    call: beside the built-in ones hidden, reward, runner, history and upstream, or in place of the one of that name.
    Empty: that rule is off."""
    judge: Annotated[str, Field(pattern=r"^https?://[^\s]{1,1000}$")] | None = None
    """URL of an OpenAI-compatible API such as http://localhost:8000/v1, which is asked, without a key, about each call
    that a rule matches. Default: what a rule matches is blocked."""
    judge_model: Annotated[str, Field(max_length=200)] = "judge"
    """Name of the model that the judge is asked for."""
    judge_timeout_s: Positive = 30.0
    """Time for its answer. Where there is none, or none that can be read, the rule stands."""
