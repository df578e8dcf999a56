"""The pages of `glm5 rl view`: from the run to a token by clicks, and what is told by colour is seen."""

import pytest

from tests.browser.run_pages import run_pages
from tests.support.rl_run import write_run

pytestmark = pytest.mark.browser

TOKEN = ".segment.sampled .tokens span"


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "rl-guess"
    write_run(out)
    with run_pages(out) as url:
        yield url


@pytest.fixture
def view(tab, url):
    """The tab, as new, with the run's page."""
    tab.forget(f"{url}/page/icon.svg")
    tab.open(url)
    yield tab
    assert not tab.problems


def colours(view) -> dict[str, str]:
    """The tokens' background by class."""
    body = "return Object.fromEntries([...document.querySelectorAll(a)].map((one) => [one.className, "
    return view.run(f"{body}getComputedStyle(one).backgroundColor]))", TOKEN)


def test_from_the_run_to_a_token(view):
    assert view.texts("main > p a")[2].split()[0] == "3"
    view.follow("main > p a:nth-of-type(3)")
    assert len(view.texts("tr")) == 5
    view.follow("tr:nth-of-type(2) td:last-child a:last-of-type")
    assert "higher" in view.text("#conversation") or "lower" in view.text("#conversation")
    assert view.attribute(TOKEN, "title").startswith("log-probability -")
    assert view.text("nav [aria-current]") == "log-probability"
    seen = {}
    for number, name in enumerate(("log-probability", "ratio", "advantage", "mask"), start=1):
        if number > 1:
            view.follow(f"nav a:nth-of-type({number})")
        assert view.text("nav [aria-current]") == name
        seen[name] = colours(view)
    assert len(set(seen["log-probability"].values())) > 1
    assert len(set(seen["ratio"].values())) == len(seen["ratio"]) > 1
    assert len(seen["advantage"]) == 1, "a rollout has one advantage here"
    assert "rgba(0, 0, 0, 0)" not in seen["advantage"].values()
    view.follow("h1 a")
    assert "Curves" in view.text("main")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_narrow_screen_in_both_schemes(view, url, scheme):
    view.prefer(scheme)
    view.resize(360, 740)
    for path in ("", "/steps/3", "/steps/3/groups/1?colour=mask"):
        view.open(f"{url}{path}")
        assert view.evaluate("document.documentElement.scrollWidth") <= 360
    style = "getComputedStyle(document.querySelector('.segment.sampled'))"
    assert view.evaluate(f"{style}.color !== {style}.backgroundColor")
