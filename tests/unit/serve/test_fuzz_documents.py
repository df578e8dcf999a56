"""Random requests of the kinds that the OpenAPI documents tell of: no 5xx, no status and no type that they do not tell.

`tests/soak/test_fuzz_documents.py` sends more of them, and others that no document allows.
"""

import pytest

from tests.support.fuzzing import amount, api, send, tiny_server

public, admin = api(is_admin=False, coverage=False), api(is_admin=True, coverage=False)


@pytest.fixture(scope="module")
def url():
    with tiny_server(max_output_tokens=16) as url:
        yield url


@pytest.fixture(scope="module")
def admin_url():
    """Of a server that may sleep or be paused after a test."""
    with tiny_server() as url:
        yield url


@public.parametrize()
@amount(3)
def test_public_routes(case, url):
    send(case, url, "user")


@admin.parametrize()
@amount(3)
def test_admin_routes(case, admin_url):
    send(case, admin_url, "boss")
