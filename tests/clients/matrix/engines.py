"""Processes of the engines in the matrix."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: Variables for S3 clients. Checksums in trailers are disabled because some S3 servers do not accept them.
_S3_ENVIRONMENT = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}
#: Seconds without a response after which an engine is killed.
_TIMEOUT_S = 600


class EngineError(Exception):
    """An engine failed to run a command. ``kind`` is the class of the engine's error."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass
class Engine:
    """An engine in a separate process, which runs one command at a time."""

    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Engine:
        """Start the program of an engine.

        Args:
            name: The engine's name in the matrix.
            command: The interpreter, the program and its arguments.
            environment: Variables for the program. It inherits only a few variables such as PATH.
            log: The file for the messages of the program.
        """
        inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "JAVA_HOME") if key in os.environ}
        with log.open("w") as messages:
            process = subprocess.Popen(
                command,
                env={**inherited, **_S3_ENVIRONMENT, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                cwd=log.parent,
            )
        return cls(name, process)

    def wait_until_ready(self) -> None:
        assert self._read_response() == {"ready": True}

    def run(self, command: str, **fields: Any) -> Any:
        """Run a command and return its result. Raises EngineError."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **fields}) + "\n")
        self.process.stdin.flush()
        response = self._read_response()
        if "error" in response:
            raise EngineError(response["error"], response.get("message", ""))
        return response["result"]

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _read_response(self) -> Any:
        assert self.process.stdout is not None
        timer = threading.Timer(_TIMEOUT_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line, f"{self.name} ended with code {self.process.wait()}"
        return json.loads(line)
