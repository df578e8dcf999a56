"""A server in a process of its own says why it did not start."""

import pytest

from glm5.common.errors import GlmError
from glm5.serve.local import server


def test_a_server_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(GlmError, match=r"the server ended before it listened; .*server\.log says why"):
        server(tmp_path / "no model", tmp_path / "server.log").__enter__()
    assert "no such directory" in (tmp_path / "server.log").read_text()
