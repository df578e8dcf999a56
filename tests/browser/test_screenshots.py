"""The pictures in the documents can be made anew, and show what the pages show today."""

import re
from pathlib import Path

import pytest
from PIL import Image

from tests.browser.screenshots import PICTURES, take, text_of

pytestmark = pytest.mark.browser

DOCS = Path(__file__).parents[2] / "docs"
MAX_BYTES = 100_000


@pytest.fixture(scope="module")
def taken(browser, tmp_path_factory):
    return take(browser, tmp_path_factory.mktemp("images"))


def test_pictures_are_small_and_show_something(taken):
    assert [path.stem for path in taken] == list(PICTURES)
    for path in taken:
        assert path.stat().st_size < MAX_BYTES
        with Image.open(path) as image:
            assert image.size == PICTURES[path.stem][1]
            assert len(image.convert("RGB").getcolors(image.width * image.height)) > 50


def test_the_pictures_of_the_documents_are_of_today(taken):
    for path in taken:
        assert text_of(DOCS / "images" / path.name) == text_of(path), "run: make screenshots"


def test_documents_show_every_picture():
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    assert set(re.findall(r"!\[[^]]+\]\(images/(\w+)\.png\)", pages)) == set(PICTURES)
