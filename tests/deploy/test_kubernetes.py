"""The Kubernetes example against what it starts: flags, ports, paths, metrics, times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli import router as router_verb
from quire.cli import serve as serve_verb
from quire.obs.table import METRICS
from quire.router.app import OWN
from quire.router.settings import RouterSettings
from quire.server.routes import routes
from quire.server.settings import ServeSettings
from tests.rules.source import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
FILES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.yaml"))}
THINGS: list[dict[str, Any]] = [
    thing for name, text in FILES.items() for thing in yaml.safe_load_all(text)
]
VERSIONS = ("1.30", "1.34", "1.37")
AFTER_DRAIN_S = 15  # for processes to end, and for what the clock rounds


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (t for t in THINGS if t["kind"] == kind and t["metadata"]["name"] == name)
    return found


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    for thing in THINGS:
        if thing["kind"] == "Deployment":
            yield thing["metadata"]["name"], thing["spec"]["template"]


PODS = dict(pods())


def container(pod: str) -> dict[str, Any]:
    (only,) = PODS[pod]["spec"]["containers"]
    return dict(only)


def settings_of(pod: str, monkeypatch: pytest.MonkeyPatch) -> ServeSettings | RouterSettings:
    """What the container's arguments mean to the program that reads them."""
    for variable in container(pod)["env"]:
        monkeypatch.setenv(variable["name"], "a-key")
    verb, *words = container(pod)["args"]
    module: Any = {"serve": serve_verb, "router": router_verb}[verb]
    found: ServeSettings | RouterSettings = module.settings_of(
        module.build_parser().parse_args(words)
    )
    return found


def test_the_example_has_all_its_parts() -> None:
    kinds = [thing["kind"] for thing in THINGS]
    assert set(PODS) == {"quire-engines", "quire-router"}
    assert {"HorizontalPodAutoscaler", "PersistentVolumeClaim", "PodMonitor"} <= set(kinds)
    listed = yaml.safe_load(FILES["kustomization.yaml"])["resources"]
    assert set(listed) == set(FILES) - {"kustomization.yaml", "podmonitor.yaml"}


@pytest.mark.parametrize("pod", PODS)
def test_arguments_are_understood(pod: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a flag is renamed, or the server would refuse to start like this."""
    settings = settings_of(pod, monkeypatch)
    (port,) = container(pod)["ports"]
    assert settings.host == "0.0.0.0" and settings.port == port["containerPort"]
    assert settings.public_metrics  # Prometheus has no key
    if isinstance(settings, RouterSettings):
        assert settings.admin_key == "a-key"  # else engines do not tell what their caches hold
    else:
        assert settings.admin_keys == settings.api_keys == ("a-key",)


@pytest.mark.parametrize("pod", PODS)
def test_probes_ask_what_is_answered(pod: str) -> None:
    """Red when a path of the server goes away, or needs a key that a probe does not have."""
    public = {r.path for r in routes(ServeSettings()) if r.method == "GET" and r.access == "public"}
    paths = public if pod == "quire-engines" else OWN
    probes = {name: container(pod)[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert all(probe["httpGet"]["path"] in paths for probe in probes.values())
    assert probes["readiness"]["httpGet"]["path"] == "/ready"
    # An engine that is loaded again, or engines that are away, must not get a process killed.
    assert probes["liveness"]["httpGet"]["path"] == "/health"
    assert all(probe["httpGet"]["port"] == "http" for probe in probes.values())


@pytest.mark.parametrize("pod", PODS)
def test_answers_may_finish(pod: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when pods are killed before their own deadline for open answers."""
    stop = container(pod).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    pause = int(stop[1]) if stop else 0
    drain = settings_of(pod, monkeypatch).drain_s
    grace = PODS[pod]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= pause + drain + AFTER_DRAIN_S
    rolling = named("Deployment", pod)["spec"]["strategy"]["rollingUpdate"]
    assert rolling == {"maxUnavailable": 0, "maxSurge": 1}


@pytest.mark.parametrize("pod", PODS)
def test_pods_may_do_little(pod: str) -> None:
    """Red when a container could be root, write to its image, or gain what it was not given."""
    spec, own = PODS[pod]["spec"], container(pod)["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not spec["automountServiceAccountToken"]
    mounted = {m["mountPath"]: m["name"] for m in container(pod)["volumeMounts"]}
    assert set(mounted) == {"/cache", "/tmp"}
    assert set(mounted.values()) == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("pod", PODS)
def test_everything_finds_its_pods(pod: str) -> None:
    labels = PODS[pod]["metadata"]["labels"]
    assert named("Deployment", pod)["spec"]["selector"]["matchLabels"] == labels
    assert named("PodDisruptionBudget", pod)["spec"]["selector"]["matchLabels"] == labels
    service = named("Service", "quire-engines" if pod == "quire-engines" else "quire")
    assert service["spec"]["selector"] == labels
    notes = PODS[pod]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(container(pod)["ports"][0]["containerPort"])
    assert notes["prometheus.io/path"] == "/metrics"


def test_the_router_looks_where_engines_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when the name of the engines' service, or its port, changes in one place alone."""
    settings = settings_of("quire-router", monkeypatch)
    assert isinstance(settings, RouterSettings)
    (upstream,) = settings.upstreams
    service = named("Service", upstream.host)
    assert upstream.is_many and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["ports"][0]["port"] == upstream.port
    model = container("quire-engines")["args"][1]
    assert settings.tokenizer == model


def test_engines_are_scaled_by_metrics_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red when a metric is renamed, or the target is more than an engine runs at once."""
    spec = named("HorizontalPodAutoscaler", "quire-engines")["spec"]
    assert spec["scaleTargetRef"]["name"] in PODS
    (rule,) = yaml.safe_load(named("ConfigMap", "quire-adapter-rules")["data"]["config.yaml"])[
        "rules"
    ]
    known = {f"quire:{metric.name}" for metric in METRICS}
    used = set(re.findall(r"quire:\w+", rule["seriesQuery"] + rule["metricsQuery"]))
    assert len(used) == 2 and used <= known
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    settings = settings_of("quire-engines", monkeypatch)
    assert isinstance(settings, ServeSettings)
    assert int(metric["pods"]["target"]["averageValue"]) <= settings.engine.max_num_seqs


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(set(FILES) - {"kustomization.yaml", "podmonitor.yaml"}))
def test_the_published_schemas_agree(name: str, version: str) -> None:
    """Needs the package kubernetes-validate (100 MB of schemas), which no extra brings."""
    validate = pytest.importorskip("kubernetes_validate").validate
    for thing in yaml.safe_load_all(Path(FOLDER / name).read_text(encoding="utf-8")):
        validate(thing, version, strict=True)
