"""Admin routes: what each asks of the engine, what it refuses, and that nothing unknown passes."""

import json

import pytest

from glm5.common.errors import CheckpointError, EngineDead, GlmError, RequestError
from glm5.serve.operations.admin import NewWeights, Nothing, Pause, Profile, Release, Sleep, Wake
from tests.support.serving import bearer, key, scripted, served
from tests.unit.serve.test_fuzz import value


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    engine = scripted()
    with served(engine, key("boss", role="admin"), profile_dir=str(tmp_path_factory.mktemp("traces"))) as http:
        http.headers.update(bearer("boss"))
        yield http, engine


@pytest.fixture
def http(server):
    """The client; the engine has been asked nothing."""
    http, http.engine = server
    http.engine.calls.clear()
    http.engine.refuses = http.engine.stopped_because = None
    return http


# path, settings, what the engine is asked, what the answer says beside its message
CALLS = [
    ("/flush_cache", {}, [("reset_prefix_cache",)], {}),
    ("/pause_generation", {}, [("pause",), ("abort_all",)], {}),
    ("/pause_generation", {"mode": "abort"}, [("pause",), ("abort_all",)], {}),
    ("/pause_generation", {"mode": "in_place"}, [("pause",)], {}),
    ("/continue_generation", {}, [("resume",)], {}),
    ("/release_memory_occupation", {}, [("sleep", 1)], {"freed_bytes": 1000}),
    ("/release_memory_occupation", {"tags": ["kv_cache", "weights"]}, [("sleep", 1)], {"freed_bytes": 1000}),
    ("/resume_memory_occupation", {"tags": None}, [("wake_up",)], {}),
    ("/sleep", {"level": 2}, [("sleep", 2)], {"freed_bytes": 2000}),
    ("/sleep?level=2", {}, [("sleep", 2)], {"freed_bytes": 2000}),
    ("/sleep", {}, [("sleep", 1)], {"freed_bytes": 1000}),
    ("/wake_up?tags=weights&tags=kv_cache", {}, [("wake_up", ["weights", "kv_cache"])], {}),
    ("/wake_up?tags=weights", {}, [("wake_up", ["weights"])], {}),
    ("/resume_memory_occupation", {"tags": ["kv_cache"]}, [("wake_up", ["kv_cache"])], {}),
    ("/update_weights_from_disk", {"model_path": "/w"}, [("update_weights", "/w", "recompute", None)],
     {"weight_version": 7}),
    ("/update_weights_from_disk", {"model_path": "/w", "flush_cache": False, "weight_version": 12},
     [("update_weights", "/w", "keep", 12)], {"weight_version": 12}),
    ("/update_weights_from_disk", {"model_path": "/w", "abort_all_requests": True, "weight_version": "3",
                                   "load_format": "auto", "is_async": False, "torch_empty_cache": True},
     [("update_weights", "/w", "abort", None)], {"weight_version": "3"}),
    ("/stop_profile", {}, [("profile", None)], {"path": "trace.json.gz"}),
    ("/start_profile", {"model": "tiny", "prompt": "x", "stream": True, "stream_options": {}}, ..., {}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "settings", "requested", "said"), CALLS, ids=lambda value: str(value)[:40])
def test_what_a_route_does(http, path, settings, requested, said):
    answer = http.post(path, json=settings) if settings else http.post(path)
    assert answer.status_code == 200, answer.text
    if requested is not ...:
        assert http.engine.calls == requested
    content = answer.json()
    assert content.pop("success") is True
    assert content.pop("message")
    assert content == said


def test_sglang_s_clients_flush_with_get_too(http):
    assert http.get("/flush_cache").status_code == 200
    assert http.engine.calls == [("reset_prefix_cache",)]


# path, settings, message, param
REFUSED = [
    ("/flush_cache", {"force": True}, "'force' is no setting of this route; allowed: none", "force"),
    ("/flush_cache?timeout=3", {}, "'timeout' is no setting of this route; allowed: none", "timeout"),
    ("/pause_generation", {"mode": "retract"}, "mode is 'retract'; allowed: 'abort' or 'in_place'", "mode"),
    ("/sleep", {"level": 3}, "level is 3; allowed: ", "level"),
    ("/sleep?level=high", {}, "level is 'high'; allowed: ", "level"),
    ("/sleep?level=1", {"level": 1}, "settings in the query and in the body; allowed: one of the two", None),
    ("/sleep", {"Level": 1}, "'Level' is no setting of this route; allowed: level", "Level"),
    ("/release_memory_occupation", {"tags": ["weights"]}, "tags are ['weights']; allowed: weights and", "tags"),
    ("/resume_memory_occupation", {"tags": ["lora"]}, "tags.0 is 'lora'", "tags.0"),
    ("/update_weights_from_disk", {}, "model_path is missing", "model_path"),
    ("/update_weights_from_disk", {"model_path": "/w", "is_async": True}, "is_async is not supported", "is_async"),
    ("/update_weights_from_disk", {"model_path": "/w", "load_format": "gguf"}, "load_format is not", "load_format"),
    ("/update_weights_from_disk", {"model_path": "/w", "weight_version": "v" * 257}, "allowed: up to 256 ch",
     "weight_version"),
    ("/start_profile", {"output_dir": "/etc"}, "'output_dir' is no setting of this route", "output_dir"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "settings", "message", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_a_route_refuses(http, path, settings, message, param):
    answer = http.post(path, json=settings) if settings else http.post(path)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert message in error["message"]
    assert error["param"] == param
    assert not http.engine.calls


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\xff", b"1"])
def test_settings_that_are_no_object(http, content):
    answer = http.post("/sleep", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (GlmError("the engine sleeps"), 400),
        (CheckpointError("/w: no such directory"), 400),
        (RequestError("level is 7", "level"), 400),
        (EngineDead("it broke"), 503),
    ],
)
def test_what_the_engine_cannot_do_is_told_in_its_words(http, error, status):
    http.engine.refuses = error
    answer = http.post("/update_weights_from_disk", json={"model_path": "/w"})
    assert answer.status_code == status
    assert str(error) in answer.json()["error"]["message"]


def test_traces_need_a_folder():
    with served(scripted(), key("boss", role="admin")) as http:
        answer = http.post("/start_profile", headers=bearer("boss"))
    assert answer.status_code == 400
    assert "--profile-dir" in answer.json()["error"]["message"]


def test_the_document_of_the_admin_routes(http):
    document = http.get("/admin/openapi.json").json()
    fields = document["paths"]["/update_weights_from_disk"]["post"]["requestBody"]["content"]["application/json"]
    assert {"model_path", "flush_cache", "abort_all_requests", "weight_version"} <= fields["schema"][
        "properties"
    ].keys()


@pytest.mark.parametrize("kind", [Nothing, Pause, Release, Wake, Sleep, NewWeights, Profile])
def test_any_value_in_any_setting(http, rng, kind):
    paths = {
        Nothing: "/continue_generation",
        Pause: "/pause_generation",
        Release: "/release_memory_occupation",
        Wake: "/wake_up",
        Sleep: "/sleep",
        NewWeights: "/update_weights_from_disk",
        Profile: "/stop_profile",
    }
    names = [*kind.model_fields, *kind.refused, *sorted(kind.meaningless), "other"]
    for turn in range(60):
        settings = {rng.choice(names): value(rng) for _ in range(rng.randrange(4))}
        if turn % 3:
            answer = http.post(paths[kind], content=json.dumps(settings), headers={"content-type": "application/json"})
        else:
            query = {name: str(one)[:300].replace("\udcff", "") for name, one in settings.items()}
            answer = http.post(paths[kind], params=query)
        assert answer.status_code in (200, 400, 404), (settings, answer.text)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"], settings
