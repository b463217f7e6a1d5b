"""Generate ``trinitylake_ops/format/definitions_pb2`` below a folder from ``proto/definitions.proto``."""

import sys
import sysconfig
from pathlib import Path

from grpc_tools import protoc

PROJECT = Path(__file__).resolve().parent.parent
# protoc derives the name of the module, which pickled messages contain, from the path of the file.
VIRTUAL_FOLDER = "trinitylake_ops/format"


def generate(output: Path) -> None:
    """Write ``definitions_pb2.py`` and ``.pyi``. Raise SystemExit with the message of protoc if it fails."""
    plugin = Path(sysconfig.get_path("scripts")) / "protoc-gen-mypy"
    exit_code = protoc.main(
        [
            "protoc",
            f"--plugin=protoc-gen-mypy={plugin}",
            f"--proto_path={VIRTUAL_FOLDER}={PROJECT / 'proto'}",
            f"--python_out={output}",
            f"--mypy_out=quiet:{output}",
            f"{VIRTUAL_FOLDER}/definitions.proto",
        ]
    )
    if exit_code != 0:
        raise SystemExit(f"protoc failed with exit code {exit_code}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: generate_protobuf.py FOLDER")
    generate(Path(sys.argv[1]).resolve())
