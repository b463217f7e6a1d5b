"""Fuzzing of decoders with damaged and hostile files: only typed errors are raised, in bounded memory and time.

Each kind is decoded in a separate process, so that a crash or a decompression bomb does not end the tests. The number
of variants is fixed and CPU time is measured, so that results do not depend on the load of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.fuzz.decoders import DECODERS, corpus, regressions
from tests.fuzz.run import MAX_BYTES

_VARIANTS = 50
#: Numbers of variants for decoders that start a process for each variant.
_FEWER_VARIANTS = {"inventory_orc": 25}
_SOAK_S = 600
#: Arrow's default allocator reserves more address space than it uses.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "PYTHONFAULTHANDLER": "1"}


def run_fuzzer(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fuzzer module as a process."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )


def run_decoders(folder: Path, *arguments: str) -> dict[str, str]:
    """Run the structural fuzzer on decoders, and return the faults of each as text."""
    process = run_fuzzer("tests.fuzz.run", "--folder", str(folder), *arguments)
    assert process.returncode == 0, process.stderr[-4000:]
    decoders = json.loads(process.stdout)
    return {
        name: "\n".join(f"{fault['input']}: {fault['reason']}" for fault in faults) for name, faults in decoders.items()
    }


@pytest.fixture(scope="module")
def faults_by_decoder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The faults of each decoder for a fixed number of variants, as text."""
    folder = tmp_path_factory.mktemp("fuzz")
    names = [name for name in DECODERS if name not in _FEWER_VARIANTS]
    faults = run_decoders(folder, *names, "--count", str(_VARIANTS))
    for name, count in _FEWER_VARIANTS.items():
        faults |= run_decoders(folder, name, "--count", str(count))
    return faults


@pytest.mark.parametrize("name", DECODERS)
def test_variants_of_valid_files_are_decoded_or_rejected(name: str, faults_by_decoder: dict[str, str]) -> None:
    assert not faults_by_decoder[name]


@pytest.mark.parametrize("name", DECODERS)
def test_samples_are_decoded(name: str) -> None:
    decoder = DECODERS[name]
    assert corpus(name)
    for data in corpus(name):
        decoder.decode(decoder.reseal(data, decoder.path), decoder.path)


def test_regressions_belong_to_decoders() -> None:
    folders = {path.name for path in (Path(__file__).parent / "regressions").iterdir()}
    assert folders <= set(DECODERS)
    assert all(regressions(name) for name in folders)


def compressed_zeros(wbits: int) -> bytes:
    """Return compressed zeros beyond the memory limit. ``wbits`` is that of zlib: 31 for gzip, -15 for deflate."""
    compressor = zlib.compressobj(level=1, wbits=wbits)
    zeros = bytes(1 << 20)
    return b"".join(compressor.compress(zeros) for _ in range(2 * MAX_BYTES // len(zeros))) + compressor.flush()


def test_decompression_bomb_is_rejected(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    bomb.write_bytes(compressed_zeros(31))
    names = ("inventory_csv", "table_metadata_gzip")
    assert run_decoders(tmp_path, *names, "--count", "0", "--input", str(bomb)) == dict.fromkeys(names, "")


@pytest.mark.soak
@pytest.mark.timeout(12 * _SOAK_S)
@pytest.mark.parametrize("name", DECODERS)
def test_variants_are_decoded_or_rejected_for_ten_minutes(name: str, tmp_path: Path) -> None:
    """Run the structural fuzzer and then the coverage-guided one, each for half of the time. Failures show the seed."""
    seed, half_s = str(int.from_bytes(os.urandom(4))), str(_SOAK_S // 2)
    assert not run_decoders(tmp_path, name, "--seconds", half_s, "--seed", seed)[name], seed
    guided = run_fuzzer("tests.fuzz.guided", name, "--seconds", half_s, "--seed", seed, "--folder", str(tmp_path))
    assert guided.returncode == 0, f"{seed}, {tmp_path / 'current'}:\n{guided.stderr[-4000:]}"
