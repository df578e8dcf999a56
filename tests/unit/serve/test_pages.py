"""The pages are whole, load nothing from elsewhere, and are sent with what keeps them safe and current."""

import re
from importlib.resources import files

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from glm5.serve.page import pages

FOLDERS = [files(package).joinpath("static") for package in ("glm5.serve.page", "glm5.common")]
TEXTS = {entry.name: entry.read_text(encoding="utf-8") for folder in FOLDERS for entry in folder.iterdir()}
NAMES = sorted(TEXTS)
DOCUMENTS = {"/": "index.html", "/dashboard": "dashboard.html"}
MAX_LINES = 500  # of scripts and style sheets, as for Python


@pytest.fixture(scope="module")
def http():
    app = FastAPI()
    app.include_router(pages.router)
    with TestClient(app) as client:
        yield client


def used_names(name: str) -> set[str]:
    """The files that a file asks for."""
    text = TEXTS[name]
    if name.endswith(".html"):
        return {found.removeprefix("page/") for found in re.findall(r'(?:src|href)="(page/[^"]+)"', text)}
    return set(re.findall(r'from "\./([^"]+)"', text))


@pytest.mark.parametrize(("path", "name"), DOCUMENTS.items())
def test_documents(http, path, name):
    answer = http.get(path)
    assert answer.status_code == 200
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.text == TEXTS[name]


@pytest.mark.parametrize("name", NAMES)
def test_every_file_has_its_type_and_the_policy(http, name):
    answer = http.get(f"/page/{name}")
    kinds = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert answer.headers["Content-Type"].partition(";")[0] == kinds[name.rpartition(".")[2]]
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["Content-Security-Policy"]


def test_a_current_copy_is_not_sent_again(http):
    first = http.get("/page/chat.js")
    assert first.headers["Cache-Control"] == "no-cache"
    for known in (first.headers["ETag"], f'"other", W/{first.headers["ETag"]}', "*"):
        again = http.get("/page/chat.js", headers={"If-None-Match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["ETag"] == first.headers["ETag"]
    assert http.get("/page/chat.js", headers={"If-None-Match": '"older"'}).content == first.content
    assert http.get("/page/base.css").headers["ETag"] != first.headers["ETag"]


@pytest.mark.parametrize(
    "name", ["pages.py", "..%2fpages.py", "%2e%2e/pages.py", "chat.js%00", "no.js", "", ".", "%ff"]
)
def test_nothing_else_is_served(http, name):
    assert http.get(f"/page/{name}").status_code == 404


def test_pages_are_not_part_of_the_api_document(http):
    assert http.get("/openapi.json").json()["paths"] == {}


def test_every_file_is_used_and_exists():
    reached, new = set(), set(DOCUMENTS.values())
    while new:
        reached |= new
        new = set().union(*map(used_names, new)) - reached
    assert reached == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_may_not_stand_in_a_file(name):
    text = TEXTS[name]
    assert len(text.splitlines()) <= MAX_LINES
    # Addresses of other servers: only the names of XML vocabularies, which nobody fetches.
    outside = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
    assert not outside
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in text
    assert not re.search(r"""\s(?:on\w+|style)=["']""", text) or name.endswith((".js", ".css"))
    assert "<style" not in text
    assert not re.search(r"<script(?! type=\"module\" src=)", text)


def test_the_server_has_the_pages(scripted_server):
    url = scripted_server[0]
    assert httpx.get(url).text == TEXTS["index.html"]
    missing = httpx.get(f"{url}/page/nothing.js")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
