"""Processes of the engines in the matrix, and what each engine cannot do."""

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
#: Without checksums in trailers, which not every S3 server accepts.
_FOR_S3 = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required"}
#: The time after which an engine that does not reply is killed.
_SECONDS = 600


class EngineError(Exception):
    """An engine failed to carry out a command. ``kind`` is the class of its own error."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass
class Engine:
    """One engine in one process, which carries out commands one by one."""

    name: str
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Engine:
        """Start the program of an engine.

        Args:
            name: The engine's name in the matrix.
            command: The interpreter, the program and its arguments.
            environment: Variables for the program. It inherits only those that any program needs.
            log: The file for its messages.
        """
        inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "JAVA_HOME") if key in os.environ}
        with log.open("w") as messages:
            process = subprocess.Popen(
                command,
                env={**inherited, **_FOR_S3, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=messages,
                text=True,
                cwd=log.parent,
            )
        return cls(name, process)

    def wait_until_ready(self) -> None:
        assert self._reply() == {"ready": True}

    def do(self, command: str, **fields: Any) -> Any:
        """Carry out a command; returns its result. Raises EngineError."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **fields}) + "\n")
        self.process.stdin.flush()
        reply = self._reply()
        if "error" in reply:
            raise EngineError(reply["error"], reply.get("message", ""))
        return reply["result"]

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _reply(self) -> Any:
        assert self.process.stdout is not None
        limit = threading.Timer(_SECONDS, self.process.kill)
        limit.start()
        line = self.process.stdout.readline()
        limit.cancel()
        assert line, f"{self.name} ended with code {self.process.wait()}"
        return json.loads(line)
