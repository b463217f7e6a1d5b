"""A fake Kubernetes cluster: the part of its API that dagster-k8s uses, and a process for each container.

There are no images, nodes, volumes, limits or pod networks. Requests are validated with the models of the Kubernetes
client, which are generated from its OpenAPI specification. A container has the environment variables of its pod,
including those from Secrets, and only those of the machine that every program needs.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from kubernetes.client import ApiClient, V1Job

_JOBS = re.compile(r"/apis/batch/v1/namespaces/(?P<namespace>[^/?]+)/jobs(/(?P<name>[^/?]+))?(/status)?")
_PODS = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/?]+)/pods")
_INHERITED_VARIABLES = ("HOME", "LANG", "TMPDIR", "TZ")
_TERMINATE_TIMEOUT_S = 60


@dataclass
class Pod:
    """A job with one container, which is a process."""

    namespace: str
    body: dict[str, Any]
    process: subprocess.Popen[bytes]
    environment: Mapping[str, str]

    @property
    def container(self) -> dict[str, Any]:
        """The container specification of the job."""
        (container,) = self.body["spec"]["template"]["spec"]["containers"]
        assert isinstance(container, dict)
        return container

    def status(self) -> dict[str, int]:
        """Return the status of the job with its pod counts."""
        exit_code = self.process.poll()
        return {"active": 1} if exit_code is None else {"succeeded": 1} if exit_code == 0 else {"failed": 1}


@dataclass
class Cluster:
    """The fake cluster: its Secrets and ConfigMaps by name, and its jobs."""

    folder: Path
    secrets: Mapping[str, Mapping[str, str]]
    config_maps: Mapping[str, Mapping[str, str]]
    python_path: Path
    pods: dict[str, Pod] = field(default_factory=dict)
    rejected: list[str] = field(default_factory=list)

    def kubeconfig(self, url: str) -> Path:
        """Write the configuration file for clients."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": url}}],
            "users": [{"name": "dagster", "user": {}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "dagster", "namespace": "lake"}}],
            "current-context": "fake",
        }
        path = self.folder / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        return path

    def create(self, namespace: str, body: dict[str, Any]) -> None:
        """Create a job and start its container. Raises ValueError for fields that Kubernetes' models do not have."""
        client = ApiClient()
        job = client.deserialize(SimpleNamespace(data=json.dumps(body)), V1Job)
        if (accepted := client.sanitize_for_serialization(job)) != body:
            raise ValueError(f"unknown fields in a Job: {accepted} is not {body}")
        container = body["spec"]["template"]["spec"]["containers"][0]
        environment = self._environment(container)
        name = body["metadata"]["name"]
        self._mount(body["spec"]["template"]["spec"])
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*container.get("command", []), *container["args"]],
                env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self.pods[name] = Pod(namespace, body, process, environment)

    def _environment(self, container: Mapping[str, Any]) -> dict[str, str]:
        environment = {name: os.environ[name] for name in _INHERITED_VARIABLES if name in os.environ}
        environment |= {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(self.python_path)}
        for source in container.get("envFrom", []):
            if secret := source.get("secretRef"):
                environment |= {
                    key: base64.b64decode(value).decode() for key, value in self.secrets[secret["name"]].items()
                }
            else:
                environment |= self.config_maps[source["configMapRef"]["name"]]
        for variable in container.get("env", []):
            environment[variable["name"]] = variable["value"]
        return environment

    def _mount(self, spec: Mapping[str, Any]) -> None:
        """Write the files of ConfigMaps to the container's mount paths."""
        maps = {volume["name"]: volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume}
        for mount in spec["containers"][0]["volumeMounts"]:
            if mount["name"] in maps:
                Path(mount["mountPath"]).write_text(self.config_maps[maps[mount["name"]]][mount["subPath"]])

    def log(self) -> str:
        """Return the output of all containers."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def terminate(self) -> None:
        """Terminate running containers."""
        for pod in self.pods.values():
            pod.process.terminate()
            pod.process.wait(_TERMINATE_TIMEOUT_S)


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster

    def _respond(self, status: int, content: Mapping[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        """Create a job."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match = _JOBS.match(self.path)
        try:
            if match is None:
                raise ValueError(f"{self.path} is unknown")
            self.cluster.create(match["namespace"], body)
        except (KeyError, ValueError, OSError) as error:
            self.cluster.rejected.append(f"{self.path}: {error!r}")
            self._respond(422, {"kind": "Status", "message": repr(error)})
            return
        self._respond(201, body)

    def do_GET(self) -> None:
        """Return a job with its status, or an empty list of pods, because jobs have no separate pods."""
        match = _JOBS.match(self.path)
        pod = self.cluster.pods.get(match["name"] or "") if match is not None else None
        if pod is not None:
            self._respond(200, {**pod.body, "status": pod.status()})
        elif _PODS.match(self.path):
            self._respond(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": []})
        else:
            self._respond(404, {"kind": "Status", "message": f"{self.path} is unknown"})

    def do_DELETE(self) -> None:
        """Terminate a job."""
        match = _JOBS.match(self.path)
        pod = self.cluster.pods.get(match["name"] or "") if match is not None else None
        if pod is None:
            self._respond(404, {"kind": "Status"})
            return
        pod.process.terminate()
        self._respond(200, {"kind": "Status", "status": "Success"})

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


@contextmanager
def serving(cluster: Cluster) -> Iterator[str]:
    """Serve a cluster on loopback and yield its URL. Terminate all containers at the end."""
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            cluster.terminate()
