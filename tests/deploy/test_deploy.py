"""deploy/: linted, and its parts fit each other. No image is built here: what the container file runs is run without one."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.control.test_http import serve
from tests.readme.blocks import REPOSITORY, block_of
from tiercache.config import Config, explain

DEPLOY = REPOSITORY / "deploy"
COMPOSE, BASE = DEPLOY / "compose", DEPLOY / "kustomize" / "base"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
TOKEN = "correct-horse-battery-staple-42"
GIB = 2**30

LINTS = {
    "yamllint": ["--strict", "-c", ".yamllint.yaml", "deploy"],
    "hadolint": ["deploy/Containerfile"],
    "check-jsonschema": ["--builtin-schema", "vendor.compose-spec", "deploy/compose/compose.yaml"],
    "kubernetes-validate": ["--strict", "deploy/kustomize/base/statefulset.yaml", "deploy/kustomize/base/service.yaml"],
}


@pytest.mark.parametrize("tool", LINTS)
def test_lint(tool: str) -> None:
    program = Path(sys.prefix) / "bin" / tool
    done = subprocess.run([program, *LINTS[tool]], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def services() -> dict[str, Any]:
    return dict(read(COMPOSE / "compose.yaml")["services"])


def pod() -> dict[str, Any]:
    return dict(read(BASE / "statefulset.yaml")["spec"]["template"]["spec"])


def container(name: str) -> dict[str, Any]:
    (found,) = (one for one in pod()["containers"] if one["name"] == name)
    return dict(found)


def in_bytes(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)(\w+)", size).groups()  # type: ignore[union-attr]
    return int(number) * {"m": 2**20, "g": GIB, "gb": GIB, "Mi": 2**20, "Gi": GIB}[unit]


def last_json(instruction: str) -> list[list[str]]:
    """The exec forms of an instruction, in order."""
    joined = CONTAINERFILE.replace("\\\n", " ")
    found = re.findall(rf"^\s*{instruction}(?: --\S+)* *(?:CMD )?(\[.*\])$", joined, re.MULTILINE)
    return [json.loads(one) for one in found]


@pytest.mark.parametrize("path", [COMPOSE / "tiercache.yaml", BASE / "tiercache.yaml"], ids=["compose", "kustomize"])
def test_the_configuration_loads_without_a_warning(path: Path) -> None:
    config = Config.load(path, environ={})
    assert config.warnings == ()
    assert {tier.state for tier in explain(config).tiers} == {"on"}


def test_the_pod_has_room_for_every_cap() -> None:
    config = Config.load(BASE / "tiercache.yaml", environ={})
    (memory,) = (one["emptyDir"]["sizeLimit"] for one in pod()["volumes"] if one["name"] == "memory")
    (claim,) = read(BASE / "statefulset.yaml")["spec"]["volumeClaimTemplates"]
    assert config.shared_memory_bytes < in_bytes(memory)
    assert config.arena_bytes + in_bytes(memory) < in_bytes(container("engine")["resources"]["limits"]["memory"])
    assert config.disk_bytes < in_bytes(claim["spec"]["resources"]["requests"]["storage"])


def test_compose_has_room_for_every_cap() -> None:
    config, engine = Config.load(COMPOSE / "tiercache.yaml", environ={}), services()["engine"]
    assert config.arena_bytes + in_bytes(engine["shm_size"]) < in_bytes(engine["mem_limit"])
    redis = services()["redis"]
    most = redis["command"][redis["command"].index("--maxmemory") + 1]
    assert in_bytes(most) < in_bytes(redis["mem_limit"])
    assert all("mem_limit" in service for service in services().values())


def test_engine_and_control_meet_at_the_socket() -> None:
    """In one directory, as one user, and at the path that each of them has."""
    (command,) = last_json("CMD")[-1:]
    at = command[command.index("--socket") + 1]
    for path in (COMPOSE / "tiercache.yaml", BASE / "tiercache.yaml"):
        assert Config.load(path, environ={}).control_socket == at
    directory = str(Path(at).parent)
    for name in ("engine", "control"):
        assert any(volume.endswith(f":{directory}") for volume in services()[name]["volumes"])
        assert directory in [mount["mountPath"] for mount in container(name)["volumeMounts"]]
    users = re.findall(r"^USER (\d+)$", CONTAINERFILE, re.MULTILINE)
    assert set(users) - {"0"} == {str(pod()["securityContext"]["runAsUser"])}


def test_an_engine_that_is_stopped_has_time_to_write_what_is_queued() -> None:
    """The cache ends before a worker is killed, that one before the engine, and the engine before the container."""
    worker_s = int(re.search(r"VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS=(\d+)", CONTAINERFILE)[1])  # type: ignore[index]
    entry = last_json("ENTRYPOINT")[-1]
    engine_s = int(entry[entry.index("--shutdown-timeout") + 1])
    closes_s = max(Config.load(at / "tiercache.yaml", environ={}).close_timeout_s for at in (COMPOSE, BASE))
    compose_s = int(services()["engine"]["stop_grace_period"].removesuffix("s"))
    assert closes_s < worker_s < engine_s < min(compose_s, pod()["terminationGracePeriodSeconds"])


def test_files_of_tiers_lie_on_volumes() -> None:
    for path, mounts in (
        (COMPOSE / "tiercache.yaml", [volume.split(":")[1] for volume in services()["engine"]["volumes"]]),
        (BASE / "tiercache.yaml", [mount["mountPath"] for mount in container("engine")["volumeMounts"]]),
    ):
        config = Config.load(path, environ={})
        for place in (*config.local_disk, *([config.shared_memory_path] if config.shared_memory_path else [])):
            assert any(Path(place).is_relative_to(mount) for mount in mounts), place


def test_everything_that_compose_mounts_is_there() -> None:
    sources = [volume.split(":")[0] for service in services().values() for volume in service.get("volumes", [])]
    named = read(COMPOSE / "compose.yaml")["volumes"]
    assert {source for source in sources if source not in named and not (COMPOSE / source).exists()} == set()


def test_prometheus_asks_services_at_ports_that_they_have() -> None:
    jobs = read(COMPOSE / "prometheus.yml")["scrape_configs"]
    targets = [target for job in jobs for one in job["static_configs"] for target in one["targets"]]
    ports = set(re.findall(r"^EXPOSE (\d+)$", CONTAINERFILE, re.MULTILINE))
    assert {target.split(":")[0] for target in targets} == {"engine", "control"} <= services().keys()
    assert {target.split(":")[1] for target in targets} == ports
    (source,) = read(COMPOSE / "grafana" / "datasource.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in services()


def test_the_engine_is_started_with_the_connector() -> None:
    entry = last_json("ENTRYPOINT")[-1]
    given = json.loads(entry[entry.index("--kv-transfer-config") + 1])
    words = shlex.split(block_of("README.md", "vLLM", "sh").commands()[0])
    assert given == json.loads(words[words.index("--kv-transfer-config") + 1])


async def test_the_health_check_of_the_image_tells_a_server_from_none(tmp_path: Path) -> None:
    """The container file's own command and check, on another port; the engine that it asks has not started yet."""
    assert last_json("CMD")[-1][0] == "serve-control" and last_json("ENTRYPOINT")[0] == ["tiercache"]
    check = last_json("HEALTHCHECK")[0]
    async with serve(tmp_path, TIERCACHE_CONTROL_TOKEN=TOKEN) as client:
        port = str(client.base_url.port)
        healthy = [sys.executable, *(part.replace("8300", port) for part in check[1:])]
        assert (await client.get("/healthz")).status_code == 200
        assert subprocess.run(healthy, capture_output=True, timeout=30).returncode == 0
    assert subprocess.run(healthy, capture_output=True, timeout=30).returncode != 0
