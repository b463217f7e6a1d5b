"""Damaged and hostile files of every kind: only typed errors leave a decoder, in bounded memory and time.

Each kind is decoded in a process of its own, which a bomb or a crash ends, and not the tests. How many variants are
tried is counted, and time is that of the processor, so that a busy machine changes nothing.
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

_VARIANTS = 75
#: Each variant of such a decoder takes a process of its own.
_FEWER_VARIANTS = {"inventory_orc": 25}
_SOAK_S = 600
#: Their own files say whose decoders these are; Arrow's default allocator reserves more addresses than it uses.
_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "PYTHONFAULTHANDLER": "1"}


def run_fuzzer(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a fuzzer to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **_ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )


def faults(folder: Path, *arguments: str) -> dict[str, str]:
    """Run the fuzzer by structure on decoders; return what is wrong with each, empty where nothing is."""
    done = run_fuzzer("tests.fuzz.run", "--folder", str(folder), *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    return {name: "\n".join(f"{one['input']}: {one['reason']}" for one in ones) for name, ones in found.items()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is wrong with each decoder after so many variants."""
    folder = tmp_path_factory.mktemp("fuzz")
    others = [name for name in DECODERS if name not in _FEWER_VARIANTS]
    wrong = faults(folder, *others, "--count", str(_VARIANTS))
    for name, count in _FEWER_VARIANTS.items():
        wrong |= faults(folder, name, "--count", str(count))
    return wrong


@pytest.mark.parametrize("name", DECODERS)
def test_variants_of_valid_files_are_read_or_refused(name: str, found: dict[str, str]) -> None:
    assert not found[name]


@pytest.mark.parametrize("name", DECODERS)
def test_samples_are_read(name: str) -> None:
    decoder = DECODERS[name]
    assert corpus(name)
    for data in corpus(name):
        decoder.decode(decoder.reseal(data, decoder.path), decoder.path)


def test_every_regression_is_of_a_decoder() -> None:
    folders = {path.name for path in (Path(__file__).parent / "regressions").iterdir()}
    assert folders <= set(DECODERS)
    assert all(regressions(name) for name in folders)


def endless(wbits: int) -> bytes:
    """Return zeros of more than a decoder may hold, compressed; by zlib's numbers 31 is gzip and -15 plain deflate."""
    packer = zlib.compressobj(level=1, wbits=wbits)
    zeros = bytes(1 << 20)
    return b"".join(packer.compress(zeros) for _ in range(2 * MAX_BYTES // len(zeros))) + packer.flush()


def test_a_small_file_that_decompresses_to_a_gigabyte_is_refused(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb"
    bomb.write_bytes(endless(31))
    names = ("inventory_csv", "table_metadata_gzip")
    assert faults(tmp_path, *names, "--count", "0", "--input", str(bomb)) == dict.fromkeys(names, "")


@pytest.mark.soak
@pytest.mark.timeout(12 * _SOAK_S)
@pytest.mark.parametrize("name", DECODERS)
def test_ten_minutes_of_variants(name: str, tmp_path: Path) -> None:
    """Half of the time by structure, half led by coverage of the program; the seed of the day, shown when it fails."""
    seed, half_s = str(int.from_bytes(os.urandom(4))), str(_SOAK_S // 2)
    assert not faults(tmp_path, name, "--seconds", half_s, "--seed", seed)[name], seed
    guided = run_fuzzer("tests.fuzz.guided", name, "--seconds", half_s, "--seed", seed, "--folder", str(tmp_path))
    assert guided.returncode == 0, f"{seed}, {tmp_path / 'current'}:\n{guided.stderr[-4000:]}"
