"""Gateways with workers on clusters, as operators copy them: Kubernetes and Ray.

Nothing is started here; `test_deploy_workers` says what is held to what.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import yaml

from runtime.access.gate import OPEN_PATHS
from runtime.net.tls import Certificate
from runtime.settings.sources import given, read
from runtime.worker.command import END_WAIT_S
from tests.project.deploying import (
    USER,
    Json,
    check_health,
    make_secrets,
    parse,
    serving,
    shake_hands,
    text_of,
    working,
)
from tests.test_deploy import drains_within, image_environment, settings_of, shown


def documents(name: str, kind: str) -> list[Json]:
    """The objects of one kind in a manifest."""
    return [it for it in yaml.safe_load_all(text_of(name)) if it["kind"] == kind]


# -- Kubernetes and KubeRay -----------------------------------------------------------------------


def templates(name: str) -> Iterator[tuple[Json, list[Json]]]:
    """The templates of all pods in a manifest, each with its claims."""
    for owner in documents(name, "StatefulSet"):
        yield owner["spec"]["template"], owner["spec"].get("volumeClaimTemplates", [])
    for cluster in documents(name, "RayCluster"):
        yield cluster["spec"]["headGroupSpec"]["template"], []
        yield from ((group["template"], []) for group in cluster["spec"]["workerGroupSpecs"])


def created(name: str) -> dict[str, dict[str, str]]:
    """The secrets that the first lines create: their keys, and the files of these."""
    found = {}
    for words in shown(text_of(name)):
        if words[0] == "kubectl" and "secret" in words:
            given_files = [it.removeprefix("--from-file=") for it in words if "--from-file=" in it]
            parts = [it.partition("=") for it in given_files]
            found[words[words.index("generic") + 1]] = {it[0]: it[2] or it[0] for it in parts}
    return found


def mounted(name: str, template: Json, claims: list[Json], folder: Path) -> dict[str, Path]:
    """The files of secrets in a pod's container; each mount has its volume."""
    spec = template["spec"]
    (container,) = spec["containers"]
    volumes = {it["name"]: it for it in spec["volumes"]}
    real: dict[str, Path] = {}
    for mount in container["volumeMounts"]:
        if mount["name"] in {claim["metadata"]["name"] for claim in claims}:
            continue
        secret = volumes[mount["name"]].get("secret")
        if secret is None:
            continue
        keys = created(name)[secret["secretName"]]
        items = secret.get("items", [{"key": key, "path": key} for key in keys])
        assert secret["defaultMode"] == 0o440
        for item in items:
            source = keys[item["key"]]
            source = f"keys/{source}" if source == "keys.toml" else source
            real[f"{mount['mountPath']}/{item['path']}"] = folder / source
    used = {mount["name"] for mount in container["volumeMounts"]}
    assert used == set(volumes) | {claim["metadata"]["name"] for claim in claims}
    return real


MANIFESTS: Final = ("kubernetes.yaml", "kuberay.yaml")


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_are_the_image_s_user_and_are_asked_what_they_answer(name: str) -> None:
    """A pod is root, is killed for a path that does not exist, or is never ready."""
    for template, _ in templates(name):
        spec = template["spec"]
        (container,) = spec["containers"]
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert {security[it] for it in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
        assert container["image"] == "antiphon"
        assert "memory" in container["resources"]["limits"]
        ports = {it["name"]: it["containerPort"] for it in container["ports"]}
        for probe in (container.get("livenessProbe"), container["readinessProbe"]):
            if probe is None or "exec" in probe:
                continue
            asked = probe.get("httpGet") or probe["tcpSocket"]
            assert asked["port"] in ports
            if "httpGet" in probe:
                assert asked["path"] in OPEN_PATHS
                assert ports[asked["port"]] == int(image_environment()["ANTIPHON_PORT"])
        # Set by the image; a name in a manifest would have to be a setting.
        settings_of(
            {**image_environment(), **{it["name"]: it["value"] for it in container.get("env", ())}}
        )


@pytest.mark.parametrize("name", MANIFESTS)
def test_services_find_their_pods(name: str) -> None:
    """Clients, or the gateway, reach nothing."""
    pods = [it for it, _ in templates(name)]
    selected = [(it["spec"]["selector"], it["spec"]["ports"]) for it in documents(name, "Service")]
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for it in documents(name, kind):
            label = it["spec"].get("selector") or it["spec"]["podSelector"]
            selected.append((label["matchLabels"], []))
    for labels, ports in selected:
        (pod,) = [it for it in pods if it.get("metadata", {}).get("labels") == labels]
        names = {it["name"]: it["containerPort"] for it in pod["spec"]["containers"][0]["ports"]}
        for port in ports:
            assert names[port["targetPort"]] == port["port"]


def test_the_pods_of_workers_are_reached_by_their_names(tmp_path: Path) -> None:
    """Sessions would wait for workers for ever."""
    name = "kubernetes.yaml"
    make_secrets(text_of(name), tmp_path)
    gateway, workers = documents(name, "StatefulSet")
    (pod, claims), (worker_pod, _) = templates(name)
    (container,), (worker,) = pod["spec"]["containers"], worker_pod["spec"]["containers"]
    real = mounted(name, pod, claims, tmp_path)
    files = mounted(name, worker_pod, [], tmp_path)
    environ = {**image_environment(), **{it["name"]: it["value"] for it in container["env"]}}
    settings = serving(container["args"], environ, real)
    listens = working(worker["args"], files)
    spec, space = workers["spec"], workers["metadata"]["namespace"]
    hosts = [
        f"{workers['metadata']['name']}-{index}.{spec['serviceName']}.{space}.svc"
        for index in range(spec["replicas"])
    ]
    assert settings.worker_addresses == tuple(f"tcp:{it}:{listens.port}" for it in hosts)
    options = parse(worker["args"]).params
    certificate = Certificate(files[str(options["tls_cert"])], files[str(options["tls_key"])])
    for host in hosts:
        shake_hands(host, real[str(settings.worker_ca)], certificate)
    check_health(worker["readinessProbe"]["exec"]["command"], listens.port, files)
    (headless,) = [it for it in documents(name, "Service") if it["spec"].get("clusterIP") == "None"]
    assert headless["metadata"]["name"] == spec["serviceName"]
    assert headless["spec"]["publishNotReadyAddresses"] is True
    assert {it.rpartition("/")[2] for it in real} == {"token", "ca.crt", "keys.toml"}
    assert drains_within(pod["spec"]["terminationGracePeriodSeconds"], settings)
    assert worker_pod["spec"]["terminationGracePeriodSeconds"] > END_WAIT_S
    assert gateway["spec"]["replicas"] == 1
    mounts = {it["name"]: it["mountPath"] for it in container["volumeMounts"]}
    assert mounts["recordings"] == str(settings.record_to)
    assert options["model"] in {it["mountPath"] for it in worker["volumeMounts"]}
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1


# -- Ray ------------------------------------------------------------------------------------------


def served_by(text: str) -> list[str]:
    """The one line of a shell or a unit that serves, as words after `antiphon`."""
    (line,) = re.findall(r"\S*\bantiphon (serve .+)$", text, re.MULTILINE)
    return shlex.split(line)


def wanted(words: list[str]) -> int:
    """The workers that a gateway asks Ray for, of a command line as it was agreed."""
    at = words.index("--placement")
    assert words[at : at + 3] == ["--placement", "ray", "--workers-wanted"]
    return int(words[at + 3])


def test_the_gateway_in_a_ray_cluster_can_start(tmp_path: Path) -> None:
    """The cluster would have machines, and nothing that serves."""
    name = "kuberay.yaml"
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "keys.toml").touch()
    (cluster,) = documents(name, "RayCluster")
    gateway, workers = cluster["spec"]["workerGroupSpecs"]
    for template, claims in templates(name):
        mounted(name, template, claims, tmp_path)
        (container,) = template["spec"]["containers"]
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    template = gateway["template"]
    (container,), (worker,) = (it["template"]["spec"]["containers"] for it in (gateway, workers))
    words = served_by(container["args"][0])
    settings = read(flags=given(parse(words)), environ=image_environment()).settings
    assert str(settings.keys) in mounted(name, template, [], tmp_path)
    assert drains_within(template["spec"]["terminationGracePeriodSeconds"], settings)
    mounts = {it["name"]: it["mountPath"] for it in container["volumeMounts"]}
    assert mounts["recordings"] == str(settings.record_to)
    claims = {it["metadata"]["name"] for it in documents(name, "PersistentVolumeClaim")}
    assert claims == {"antiphon-recordings"}
    # Workers read the model where the gateway says that it is.
    for each in (container, worker):
        assert settings.model in {it["mountPath"] for it in each["volumeMounts"]}
    assert wanted(words) == workers["maxReplicas"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_the_gateway_of_launched_machines_can_start() -> None:
    """`ray up` would end well, and nothing would serve."""
    words = served_by(text_of("antiphon-ray.conf"))
    assert given(parse(words))["model"] == "/srv/model"
    assert words[1:3] == ["--config", "/etc/antiphon/antiphon.toml"]
    cluster = yaml.safe_load(text_of("ray-cluster.yaml"))
    count = len(cluster["provider"]["worker_ips"])
    assert cluster["min_workers"] == cluster["max_workers"] == count
    assert wanted(words) % count == 0
    assert "sudo systemctl start antiphon" in cluster["head_start_ray_commands"]
    (port,) = re.findall(r"--port=(\d+)", " ".join(cluster["head_start_ray_commands"]))
    assert cluster["worker_start_ray_commands"][-1].endswith(f"--address=$RAY_HEAD_IP:{port}")
