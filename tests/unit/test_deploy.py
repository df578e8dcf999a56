"""The manifests of docs/deploy, against schemas written from the CRDs of LWS 0.8 and of Gateway API Inference Extension
1.0, and from Kubernetes' API: the parts that are used, without unknown fields. Their flags are parsed."""

import copy
import re
from pathlib import Path

import jsonschema
import pytest
import yaml

from glm5.cli.main import parse
from glm5.config.kv_events import KvEventsConfig
from tests.unit.test_docs import REPO

FILES = sorted((REPO / "docs/deploy").glob("*.yaml"))
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
LABEL = {"type": "string", "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$", "maxLength": 63}
LABELS = {"type": "object", "additionalProperties": LABEL}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
COUNT = {"type": "integer", "minimum": 0}
PORTION = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+%$"}]}


def record(required: str = "", **properties) -> dict:
    """An object with these fields and no others."""
    return {
        "type": "object", "additionalProperties": False, "properties": properties, "required": required.split(),
    }  # fmt: skip


def a_list(items: dict) -> dict:
    return {"type": "array", "items": items, "minItems": 1}


METADATA = record("name", name=NAME, labels=LABELS)
PROBE = record(
    "httpGet",
    httpGet=record("path port", path={"type": "string", "pattern": "^/"}, port=PORT),
    periodSeconds={"type": "integer", "minimum": 1},
    failureThreshold={"type": "integer", "minimum": 1},
)
KEY = record("name key", name=NAME, key={"type": "string"})
SOURCE = record(fieldRef=record("fieldPath", fieldPath={"enum": ["status.podIP"]}), secretKeyRef=KEY)
SOURCE |= {"minProperties": 1, "maxProperties": 1}
CONTAINER = record(
    "name image args ports readinessProbe",
    name=NAME,
    image={"type": "string"},
    args=a_list({"type": "string"}),
    env=a_list(record("name", name={"type": "string"}, value={"type": "string"}, valueFrom=SOURCE)),
    ports=a_list(record("containerPort", name={**NAME, "maxLength": 15}, containerPort=PORT)),
    startupProbe=PROBE,
    livenessProbe=PROBE,
    readinessProbe=PROBE,
    resources=record(limits={"type": "object", "additionalProperties": {"type": "string"}}),
    volumeMounts=a_list(
        record("name mountPath", name=NAME, mountPath={"type": "string"}, readOnly={"type": "boolean"})
    ),
)
VOLUME = record(
    "name",
    name=NAME,
    persistentVolumeClaim=record("claimName", claimName=NAME),
    emptyDir=record(medium={"enum": ["", "Memory"]}, sizeLimit={"type": "string", "pattern": r"^\d+[KMG]i$"}),
)
POD = record("containers", containers=a_list(CONTAINER), volumes=a_list(VOLUME), terminationGracePeriodSeconds=COUNT)
POD_TEMPLATE = record("metadata spec", metadata=record("labels", labels=LABELS), spec=POD)
SELECTOR = record("matchLabels", matchLabels=LABELS)


def kind(version: str, name: str, spec: dict) -> dict:
    fields = {"apiVersion": {"const": version}, "kind": {"const": name}, "metadata": METADATA, "spec": spec}
    return record(" ".join(fields), **fields)


SCHEMAS = {
    "LeaderWorkerSet": kind(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        record(
            "leaderWorkerTemplate",
            replicas=COUNT | {"maximum": 1_000_000},
            startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
            networkConfig=record("subdomainPolicy", subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
            rolloutStrategy=record(
                "type",
                type={"const": "RollingUpdate"},
                rollingUpdateConfiguration=record(maxUnavailable=PORTION, maxSurge=PORTION, partition=COUNT),
            ),
            leaderWorkerTemplate=record(
                "workerTemplate",
                size={"type": "integer", "minimum": 1},
                restartPolicy={
                    "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"],
                },
                leaderTemplate=POD_TEMPLATE,
                workerTemplate=POD_TEMPLATE,
            ),
        ),
    ),
    "InferencePool": kind(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        record(
            "selector targetPorts endpointPickerRef",
            selector=SELECTOR,
            targetPorts=a_list(record("number", number=PORT)) | {"maxItems": 8},
            endpointPickerRef=record(
                "name",
                group={"type": "string"},
                kind={"type": "string"},
                name={"type": "string", "minLength": 1, "maxLength": 253},
                port=record("number", number=PORT),
                failureMode={"enum": ["FailOpen", "FailClose"]},
            ),
        ),
    ),
    "NetworkPolicy": kind(
        "networking.k8s.io/v1",
        "NetworkPolicy",
        record(
            "podSelector",
            podSelector=SELECTOR,
            policyTypes=a_list({"enum": ["Ingress", "Egress"]}),
            ingress=a_list(
                record("from", **{"from": a_list(record(podSelector={"type": "object", "maxProperties": 0}))})
            ),
        ),
    ),
    "Deployment": kind(
        "apps/v1", "Deployment", record("selector template", replicas=COUNT, selector=SELECTOR, template=POD_TEMPLATE)
    ),
    "Service": kind(
        "v1",
        "Service",
        record("ports", selector=LABELS, ports=a_list(record("port", name=NAME, port=PORT, targetPort=PORT))),
    ),
}


def documents(path: Path) -> list[dict]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def check(document: dict) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[document["kind"]]).validate(document)


def templates(path: Path) -> list[dict]:
    """Pods of a file."""
    specs = [document["spec"] for document in documents(path) if document["kind"] in ("Deployment", "LeaderWorkerSet")]
    return [spec.get("template") or spec["leaderWorkerTemplate"]["workerTemplate"] for spec in specs]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_manifests_follow_their_schemas(path):
    for document in documents(path):
        check(document)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_pod_drains_and_is_ready_as_the_guide_says(path):
    for template in templates(path):
        pod = template["spec"]
        (container,) = pod["containers"]
        args = parse(["serve", *container["args"]])
        grace, timeout = pod["terminationGracePeriodSeconds"], float(getattr(args, "shutdown_timeout"))  # noqa: B009
        assert grace > timeout
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        assert getattr(args, "tensor_parallel_size") == container["resources"]["limits"]["nvidia.com/gpu"]  # noqa: B009
        has_key = "GLM5_API_KEY" in [entry["name"] for entry in container["env"]]
        kinds = [document["kind"] for document in documents(path)]
        assert has_key or "NetworkPolicy" in kinds, "everybody could use it"
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names


def test_a_group_is_started_anew_as_a_whole():
    (lws,) = (one for one in documents(REPO / "docs/deploy/lws.yaml") if one["kind"] == "LeaderWorkerSet")
    template = lws["spec"]["leaderWorkerTemplate"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    (container,) = template["workerTemplate"]["spec"]["containers"]
    assert "--supervise" not in container["args"], "a supervised server would go on without the group"


def test_llm_d_finds_pods_and_events():
    pool, deployment, policy = documents(REPO / "docs/deploy/llm-d.yaml")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    (flag,) = (arg for arg in container["args"] if arg.startswith("--kv-events-config="))
    config = KvEventsConfig.model_validate_json(flag.partition("=")[2])
    assert config.is_on
    assert (config.endpoint, config.replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")
    assert ports["kv-events"] == 5557
    assert re.fullmatch(r"kv@\$\(POD_IP\):8000@glm-5", config.topic)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "leaderWorkerTemplate", "restartPolicy"), "Always"),
        (("spec", "leaderWorkerTemplate", "workerTemplates"), {}),
        (("spec", "replicas"), -1),
        (("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containers"), []),
        (("metadata", "name"), "GLM_5"),
    ],
)
def test_the_schemas_notice(path, value):
    document = copy.deepcopy(documents(REPO / "docs/deploy/lws.yaml")[0])
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check(document)
