"""Decode many variants of valid files in processes with limited memory, and report those that are handled incorrectly.

``python -m tests.fuzz.run DECODER... [--count N] [--seed S] [--seconds T] --folder F`` prints the faults of each
decoder as JSON. The current input is in ``F/DECODER/current``, so that an input that crashes the process is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from tests.fuzz.decoders import DECODERS, Decoder, corpus, regressions
from tests.fuzz.mutations import mutate_file
from trinitylake_ops.errors import TrinityLakeError

#: Maximum additional memory and CPU time for one file.
MAX_BYTES = 512 << 20
MAX_CPU_S = 5.0
_HARD_CPU_S = 60
#: Additional address space of the process, so that a decompression bomb ends this process and not the machine.
_ADDRESS_SPACE_BYTES = 2 << 30
_MAX_FAULTS = 20
_MAX_REASON_CHARS = 400


@dataclass(frozen=True)
class Fault:
    """The file of an input that a decoder handled incorrectly, and the reason."""

    input: str
    reason: str


def peak_bytes() -> int:
    """Return the peak memory of this process since :func:`reset_peak`."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) << 10


def reset_peak() -> None:
    """Reset the peak to the current memory of the process."""
    Path("/proc/self/clear_refs").write_text("5")


def limit_process() -> None:
    """Limit the address space of this process."""
    text = Path("/proc/self/status").read_text()
    address_bytes = int(text.partition("VmSize:")[2].split()[0]) << 10
    resource.setrlimit(
        resource.RLIMIT_AS, (address_bytes + _ADDRESS_SPACE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1])
    )


def fault_of(decoder: Decoder, data: bytes) -> str | None:
    """Decode a file. Return a fault, or None if the file was decoded or rejected with a typed error."""
    begun_s = time.process_time()
    before = peak_bytes()
    reason = None
    used_s = int(begun_s)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + _HARD_CPU_S, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        decoder.decode(data, decoder.path)
    except TrinityLakeError as error:
        reason = _lack_of_memory(error)
    except Exception as error:  # noqa: BLE001 - every other error is a fault
        reason = f"{type(error).__name__}: {error}"
    took_s, growth_bytes = time.process_time() - begun_s, peak_bytes() - before
    if growth_bytes > MAX_BYTES:
        reset_peak()
        reason = f"decoding took {growth_bytes >> 20} MiB of memory"
    elif took_s > MAX_CPU_S:
        reason = f"decoding took {took_s:.1f} s"
    return None if reason is None else reason[:_MAX_REASON_CHARS]


def _lack_of_memory(error: BaseException | None) -> str | None:
    """Return the failed allocation that caused a rejection, if any."""
    while error is not None:
        if isinstance(error, MemoryError):
            return f"rejected only because of insufficient memory: {error}"
        error = error.__cause__ or error.__context__
    return None


def variants(name: str, count: int | None, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield (description, bytes) of samples, regressions and ``count`` variants, or endless variants for None."""
    decoder = DECODERS[name]
    seeds = corpus(name)
    yield from ((f"sample {number}", decoder.reseal(data, decoder.path)) for number, data in enumerate(seeds))
    yield from regressions(name).items()
    number = 0
    while count is None or number < count:
        rng = random.Random(f"{name} {seed} {number}")
        yield (
            f"variant {seed}/{number}",
            decoder.reseal(mutate_file(rng.choice(seeds), decoder.mutate, rng), decoder.path),
        )
        number += 1


def run(
    name: str, count: int | None, seed: int, seconds: float | None, folder: Path, extra_inputs: Sequence[Path] = ()
) -> list[Fault]:
    """Decode ``count`` variants, or variants for a time. Write the inputs of faults to a folder, and return the faults.

    The files ``extra_inputs`` are decoded first.
    """
    decoder = DECODERS[name]
    for data in corpus(name):
        fault_of(decoder, decoder.reseal(data, decoder.path))
    limit_process()
    end_s = None if seconds is None else time.monotonic() + seconds
    faults: dict[str, Fault] = {}
    extra = ((extra_input.name, extra_input.read_bytes()) for extra_input in extra_inputs)
    for description, data in chain(extra, variants(name, count, seed)):
        (folder / "current").write_bytes(data)
        reason = fault_of(decoder, data)
        if reason is not None and reason[:60] not in faults:
            input_path = folder / description.replace(" ", "-").replace("/", "-")
            input_path.write_bytes(data)
            faults[reason[:60]] = Fault(str(input_path), reason)
        if len(faults) >= _MAX_FAULTS or (end_s is not None and time.monotonic() > end_s):
            break
    return list(faults.values())


def run_forked(name: str, options: argparse.Namespace) -> list[Fault]:
    """Run a decoder in a forked process. An input that crashes the process is a fault."""
    folder = options.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    faults_path = folder / "faults.json"
    child_pid = os.fork()
    if not child_pid:
        faults = run(name, options.count, options.seed, options.seconds, folder, options.input)
        faults_path.write_text(json.dumps([asdict(fault) for fault in faults]))
        os._exit(0)
    _, status = os.waitpid(child_pid, 0)
    if status:
        exit_code = os.waitstatus_to_exitcode(status)
        return [Fault(str(folder / "current"), f"the process ended with {exit_code}")]
    return [Fault(**fault) for fault in json.loads(faults_path.read_text())]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("decoders", nargs="+", choices=DECODERS)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--input", type=Path, action="append", default=[])
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    # In one process, because loading the program takes longer than most decoders.
    faults_by_decoder = {name: run_forked(name, options) for name in options.decoders}
    json.dump({name: [asdict(fault) for fault in faults] for name, faults in faults_by_decoder.items()}, sys.stdout)


if __name__ == "__main__":
    main()
