"""One browser and one tab for all tests, which is emptied before each. Without Chromium, the tests are skipped."""

import pytest

from tests.browser.devtools import Browser, find_browser
from tests.browser.scripted import EMPTY, Script, create_app, running


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    path = find_browser()
    if path is None:
        pytest.skip("needs Chromium on the path (Debian's package chromium)")
    browser = Browser(path, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def server():
    """The script of a server, and its address."""
    script = Script()
    with running(create_app(script)) as url:
        yield script, url


@pytest.fixture(scope="session")
def tab(browser):
    """A new one costs a second, an emptied one a tenth of that."""
    with browser.page() as page:
        yield page


@pytest.fixture
def page(tab, server):
    """The tab, as new, and the server's script, empty. Whatever its console counts as an error fails the test, unless
    the test took it from `page.problems`."""
    server[0].__init__()
    tab.url = server[1]
    tab.forget(tab.url + EMPTY)
    yield tab
    assert not tab.problems


@pytest.fixture
def script(page, server):
    """The server's script; no page asks for anything yet."""
    return server[0]


@pytest.fixture
def chat(page, script):
    """The chat page, with its models."""
    page.open(page.url)
    page.wait("document.querySelector('#model').value")
    return page
