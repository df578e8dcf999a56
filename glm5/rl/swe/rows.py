"""Rows of published sets of software tasks, as one record. Their images must be had elsewhere: rows are only read.

SWE-bench      FAIL_TO_PASS and PASS_TO_PASS as JSON in text, base_commit, test_patch
SWE-smith      the same keys, an image for each repository
SWE-rebench    the same, docker_image, install_config with test_cmd and log_parser
R2E-Gym        docker_image, commit_hash, expected_output_json: the status of each test
"""

from typing import Annotated, Self

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json

from glm5.common.errors import DataError

MAX_CHARS = 4_000_000


def _json(value: object) -> object:
    return from_json(value) if isinstance(value, str) else value


class _Install(BaseModel):
    test_cmd: str = ""
    log_parser: str = ""


class Row(BaseModel):
    """A task. `image`: of Docker; `base`: a commit; `patch`: the solution; "" for what the set does not tell."""

    model_config = ConfigDict(frozen=True)

    repo: str = Field(validation_alias=AliasChoices("repo", "repo_name"))
    image: str = Field("", validation_alias=AliasChoices("docker_image", "image_name"))
    base: str = Field("", validation_alias=AliasChoices("base_commit", "commit_hash"))
    problem: str = Field(validation_alias="problem_statement")
    patch: str = ""
    fail_to_pass: Annotated[tuple[str, ...], BeforeValidator(_json)] = Field((), validation_alias="FAIL_TO_PASS")
    pass_to_pass: Annotated[tuple[str, ...], BeforeValidator(_json)] = Field((), validation_alias="PASS_TO_PASS")
    install: _Install = Field(_Install(), validation_alias="install_config")
    statuses: Annotated[dict[str, str], BeforeValidator(_json)] = Field({}, validation_alias="expected_output_json")

    @model_validator(mode="after")
    def _has_tests(self) -> Self:
        if not self.must_pass:
            raise ValueError("no test must pass, so that nothing could be rewarded; leave the row out")
        return self

    @property
    def must_pass(self) -> tuple[str, ...]:
        return self.fail_to_pass or tuple(name for name, told in self.statuses.items() if told in ("PASSED", "XFAIL"))


def read_row(line: str) -> Row:
    """A row of any of the sets (JSON). Raises DataError, which names the key that is wrong."""
    if len(line) > MAX_CHARS:
        raise DataError(f"{line!r:.80}: no row; allowed: a JSON object of at most {MAX_CHARS} characters")
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "no row"
        raise DataError(f"{where}: got {first['input']!r:.40}; {first['msg']}") from None
