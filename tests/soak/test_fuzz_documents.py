"""Every operation of both OpenAPI documents, every field at its bounds, missing and of other types, and many random
requests: no 5xx, no status that is not told of, no hang; and the server goes on."""

import httpx
import pytest

from tests.support.fuzzing import SECONDS, amount, api, send, tiny_server

pytestmark = pytest.mark.slow

public, admin = api(is_admin=False), api(is_admin=True)


@pytest.fixture(scope="module")
def url():
    with tiny_server(max_output_tokens=24) as url:
        yield url
        assert httpx.get(url + "/health_generate", timeout=SECONDS).status_code == 200


@pytest.fixture(scope="module")
def admin_url():
    with tiny_server() as url:
        yield url


@public.parametrize()
@amount(40)
def test_public_routes(case, url):
    send(case, url, "user")


@admin.parametrize()
@amount(40)
def test_admin_routes(case, admin_url):
    send(case, admin_url, "boss")
