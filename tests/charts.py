"""Charts of ``deploy/helm``: rendered by Helm, validated by Kubernetes schemas, and run as processes."""

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
PATIENCE_SECONDS = 240
#: In a process of its own: the library is Go, whose threads and signals a process of tests is better without.
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
    """Helm refused a chart with its values."""


def render(values: Mapping[str, Any], chart: Path = CHART, name: str = "lake") -> list[dict[str, Any]]:
    """Return the objects that Helm makes of a chart. Raises RenderError."""
    asked = json.dumps([str(chart), values, name, "data"])
    ran = subprocess.run([sys.executable, "-c", _RENDER], input=asked, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RenderError(ran.stderr)
    files = json.loads(ran.stdout.splitlines()[-1])
    texts = [text for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return [one for text in texts for one in yaml.safe_load_all(text) if one is not None and "kind" in one]


def of_kind(objects: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the objects of a kind."""
    return [one for one in objects if one["kind"] == kind]


def pods(objects: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the spec of each pod that the objects make."""
    for one in objects:
        spec = one.get("spec", {})
        spec = spec.get("jobTemplate", {}).get("spec", spec)
        if "template" in spec:
            yield one["metadata"]["name"], spec["template"]["spec"]


def check_is_restricted(name: str, pod: Mapping[str, Any]) -> None:
    """Check what Kubernetes' standard "restricted" asks of a pod, and that nothing but mounted folders is written."""
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
    """A container of a pod as a process, with folders in the place of its volumes and the pod's variables alone."""

    def __init__(
        self,
        pod: Mapping[str, Any],
        folder: Path,
        files: Mapping[str, Mapping[str, str]],
        image: Mapping[str, str] | None = None,
    ):
        """``files`` are the contents of ConfigMaps and Secrets by their names, ``image`` the image's variables."""
        (self.spec,) = pod["containers"]
        self._folder, self._log = folder, folder.with_suffix(".log")
        folder.mkdir()
        sources = {volume["name"]: _source(volume, files) for volume in pod["volumes"]}
        self._places: dict[str, str] = {}
        claims = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
        for mount in self.spec["volumeMounts"]:
            if mount["name"] in claims:
                continue  # a folder of this machine, at the same path
            self._places[mount["mountPath"]] = str(_mounted(mount, folder, sources[mount["name"]]))
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "HOME": str(folder),
            "TMPDIR": self._places["/tmp"],
            **{name: str(folder / value.strip("/")) for name, value in (image or {}).items()},
            **{name: value for source in self.spec.get("envFrom", []) for name, value in _all_of(source, files)},
            **{one["name"]: _value(one, files) for one in self.spec.get("env", [])},
        }

    @contextmanager
    def running(self, **replaced: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run it while a block runs, with other options where a process of this machine has to differ."""
        command = [*self.spec.get("command", []), *self.spec.get("args", [])]
        mounted = re.compile(rf"(?<==)({'|'.join(self._places)})(?=/|$)")
        command = [mounted.sub(lambda found: self._places[found[0]], word) for word in command]
        for option, value in replaced.items():
            assert any(word.startswith(f"--{option}=") for word in command), option
            command = [f"--{option}={value}" if word.startswith(f"--{option}=") else word for word in command]
        process = self._start(command)
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # it ended, and so did all that it had started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def run(self, command: Sequence[str] | None = None) -> int:
        """Run it to its end, or another program in it such as that of a probe. Returns the exit status."""
        if command is not None:
            return self._start(command).wait(PATIENCE_SECONDS)
        with self.running() as process:
            return process.wait(PATIENCE_SECONDS)

    def printed(self) -> str:
        """Return what it printed so far."""
        return self._log.read_text(errors="replace")

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        program, *arguments = command
        start = [sys.executable, "-m", "trinitylake_ops.cli"] if program == "trinitylake" else [program]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [*start, *arguments], env=self.environment, cwd=self._folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - one system call, which takes no lock
            )  # fmt: skip


def _mounted(mount: Mapping[str, Any], folder: Path, content: Mapping[str, str]) -> Path:
    """Put the files of a volume where a container has them; returns the place."""
    place = folder / mount["mountPath"].strip("/")
    if "subPath" in mount:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content[mount["subPath"]])
        return place
    place.mkdir(parents=True)
    for name, text in content.items():
        (place / name).write_text(text)
    return place


def _source(volume: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
    if "emptyDir" in volume or "persistentVolumeClaim" in volume:
        return {}
    return files[volume["configMap"]["name"] if "configMap" in volume else volume["secret"]["secretName"]]


def _all_of(source: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]) -> list[tuple[str, str]]:
    wanted = source.get("secretRef") or source["configMapRef"]
    found = files.get(wanted["name"]) if wanted.get("optional") else files[wanted["name"]]
    return list((found or {}).items())


def _value(variable: Mapping[str, Any], files: Mapping[str, Mapping[str, str]]) -> str:
    if "value" in variable:
        return str(variable["value"])
    wanted = variable["valueFrom"]["secretKeyRef"]
    return files[wanted["name"]][wanted["key"]]
