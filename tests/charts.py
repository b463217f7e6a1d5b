"""Render the charts in ``deploy/helm`` with Helm, and run their containers as processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from tests.servers.daemons import die_with_parent

REPOSITORY = Path(__file__).resolve().parent.parent
HELM = REPOSITORY / "deploy" / "helm"
CHART = HELM / "trinitylake-server"
TIMEOUT_SECONDS = 240
#: Code that runs in a separate process, to keep the threads and signal handlers of the Go library out of the tests.
_RENDER = """
import json, sys
import helm_python
chart, values, name, namespace = json.loads(sys.stdin.read())
try:
    with helm_python.Chart.load(chart) as loaded:
        loaded.validate_schema(values)
        print(json.dumps(loaded.render(values, name=name, namespace=namespace)))
except helm_python.HelmError as error:
    sys.exit(str(error))
"""


class RenderError(Exception):
    """Helm rejected a chart or its values."""


def render(values: Mapping[str, Any], chart: Path = CHART, name: str = "lake") -> list[dict[str, Any]]:
    """Render a chart and return its objects.

    Args:
        values: The values of the chart.
        chart: The folder of the chart.
        name: The name of the release.

    Raises:
        RenderError: If Helm rejects the chart or its values.
    """
    arguments_json = json.dumps([str(chart), values, name, "data"])
    process = subprocess.run(
        [sys.executable, "-c", _RENDER], input=arguments_json, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise RenderError(process.stderr)
    files = json.loads(process.stdout.splitlines()[-1])
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return [item for text in texts for item in yaml.safe_load_all(text) if item is not None and "kind" in item]


def of_kind(objects: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the objects of a kind."""
    return [item for item in objects if item["kind"] == kind]


def pods(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the spec of each pod template."""
    for item in objects:
        spec = item.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if "template" in spec:
            yield item["metadata"]["name"], spec["template"]["spec"]


def check_is_restricted(name: str, pod: Mapping[str, Any]) -> None:
    """Check that a pod meets Kubernetes' "restricted" standard and writes only to mounted folders."""
    assert pod["securityContext"]["runAsNonRoot"] is True, name
    assert pod["securityContext"]["runAsUser"] > 0, name
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }, name
    for volume in pod.get("volumes", []):
        assert {*volume} - {"name"} <= {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}, name


class Container:
    """Runs a container of a pod as a process, with folders instead of volumes and only the variables of the pod."""

    def __init__(
        self,
        pod: Mapping[str, Any],
        folder: Path,
        files: Mapping[str, Mapping[str, str]],
        image: Mapping[str, str] | None = None,
    ):
        """Create the folders of a container.

        Args:
            pod: The spec of the pod.
            folder: A new folder for the volumes.
            files: The contents of ConfigMaps and Secrets, by name.
            image: The environment variables of the image. Their values are paths.
        """
        (self.spec,) = pod["containers"]
        self._folder, self._log = folder, folder.with_suffix(".log")
        folder.mkdir()
        sources = {volume["name"]: _source(volume, files) for volume in pod["volumes"]}
        self._paths: dict[str, str] = {}
        claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
        for mount in self.spec["volumeMounts"]:
            if mount["name"] in claims:
                continue  # the process uses the folder of this machine at the same path
            self._paths[mount["mountPath"]] = str(_mounted(mount, folder, sources[mount["name"]]))
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(folder),
            "TMPDIR": self._paths["/tmp"],
            **{name: str(folder / value.strip("/")) for name, value in (image or {}).items()},
            **{name: value for source in self.spec.get("envFrom", []) for name, value in _source_values(source, files)},
            **{item["name"]: _value(item, files) for item in self.spec.get("env", [])},
        }

    @contextmanager
    def running(self, **replaced: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run the container while the block runs, with some options replaced for this machine."""
        command = [*self.spec.get("command", []), *self.spec.get("args", [])]
        mount_path = re.compile(rf"(?<==)({'|'.join(self._paths)})(?=/|$)")
        command = [mount_path.sub(lambda match: self._paths[match[0]], argument) for argument in command]
        for option, value in replaced.items():
            prefix = f"--{option}="
            assert any(argument.startswith(prefix) for argument in command), option
            command = [f"{prefix}{value}" if argument.startswith(prefix) else argument for argument in command]
        process = self._start(command)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # the process and its children have already ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, command: Sequence[str] | None = None) -> int:
        """Run the container, or another command in it such as a probe, and return the exit status."""
        if command is not None:
            return self._start(command).wait(TIMEOUT_SECONDS)
        with self.running() as process:
            return process.wait(TIMEOUT_SECONDS)

    def output(self) -> str:
        """Return the output so far."""
        return self._log.read_text(errors="replace")

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        program, *arguments = command
        start = [sys.executable, "-m", "trinitylake_ops.cli"] if program == "trinitylake" else [program]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*start, *arguments], env=self.environment, cwd=self._folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call without locks
            )  # fmt: skip


def _mounted(mount: Mapping[str, Any], folder: Path, content: Mapping[str, str]) -> Path:
    """Write the files of a volume to the path of a mount, and return it."""
    path = folder / mount["mountPath"].strip("/")
    if "subPath" in mount:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content[mount["subPath"]])
        return path
    path.mkdir(parents=True)
    for name, text in content.items():
        (path / name).write_text(text)
    return path


def _source(volume: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    if "emptyDir" in volume or "persistentVolumeClaim" in volume:
        return {}
    return files[volume["configMap"]["name"] if "configMap" in volume else volume["secret"]["secretName"]]


def _source_values(source: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    reference = source.get("secretRef") or source["configMapRef"]
    content = files.get(reference["name"]) if reference.get("optional") else files[reference["name"]]
    return list((content or {}).items())


def _value(variable: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]) -> str:
    if "value" in variable:
        return str(variable["value"])
    reference = variable["valueFrom"]["secretKeyRef"]
    return files[reference["name"]][reference["key"]]
