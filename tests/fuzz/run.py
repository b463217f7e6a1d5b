"""Decode many variants of valid files in processes of limited memory, and tell those that are refused wrongly.

``python -m tests.fuzz.run DECODER... [--count N] [--seed S] [--seconds T] --folder F`` prints the faults of each
as JSON. What is decoded now is ``F/DECODER/current``, so that an input on which a process dies is kept as well.
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
from tests.fuzz.mutations import mutated
from trinitylake_ops.errors import TrinityLakeError

#: What a file may cost beyond what the process has anyway.
MAX_BYTES = 512 << 20
MAX_CPU_S = 5.0
_HARD_CPU_S = 60
#: Address space that no file may ask for, so that a bomb ends this process and not the machine.
_ADDRESSES_BYTES = 2 << 30
_MOST_FAULTS = 20
_LONGEST_REASON = 400


@dataclass(frozen=True)
class Fault:
    """An input that a decoder did not refuse as it should, and what it did instead."""

    input: str
    reason: str


def peak_bytes() -> int:
    """Return the most memory that this process held since :func:`forget_peak`."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) << 10


def forget_peak() -> None:
    """Let the peak begin anew with what the process holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def limit_process() -> None:
    """Keep this process from asking for gigabytes."""
    text = Path("/proc/self/status").read_text()
    held = int(text.partition("VmSize:")[2].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (held + _ADDRESSES_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def fault_of(decoder: Decoder, data: bytes) -> str | None:
    """Decode a file; return what is wrong with how it was refused, None where that is right or it was read."""
    begun_s = time.process_time()
    before = peak_bytes()
    reason = None
    used_s = int(begun_s)
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + _HARD_CPU_S, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        decoder.decode(data, decoder.path)
    except TrinityLakeError as error:
        reason = _lack_of_memory(error)
    except Exception as error:  # noqa: BLE001 - anything else is what is looked for
        reason = f"{type(error).__name__}: {error}"
    took_s, grown = time.process_time() - begun_s, peak_bytes() - before
    if grown > MAX_BYTES:
        forget_peak()
        reason = f"it took {grown >> 20} MiB of memory"
    elif took_s > MAX_CPU_S:
        reason = f"it took {took_s:.1f} s"
    return None if reason is None else reason[:_LONGEST_REASON]


def _lack_of_memory(error: BaseException | None) -> str | None:
    """Return the failed allocation behind a refusal: more was asked for than there was."""
    while error is not None:
        if isinstance(error, MemoryError):
            return f"refused for lack of memory only: {error}"
        error = error.__cause__ or error.__context__
    return None


def variants(name: str, count: int | None, seed: int) -> Iterator[tuple[str, bytes]]:
    """Yield (what it is, bytes): the samples, former faults, then so many variants, endless where None is given."""
    decoder = DECODERS[name]
    seeds = corpus(name)
    yield from ((f"sample {number}", decoder.reseal(data, decoder.path)) for number, data in enumerate(seeds))
    yield from regressions(name).items()
    number = 0
    while count is None or number < count:
        rng = random.Random(f"{name} {seed} {number}")
        yield f"variant {seed}/{number}", decoder.reseal(mutated(rng.choice(seeds), decoder.change, rng), decoder.path)
        number += 1


def run(
    name: str, count: int | None, seed: int, seconds: float | None, folder: Path, others: Sequence[Path] = ()
) -> list[Fault]:
    """Decode variants, so many or for so long, and return the faults; their inputs are written into a folder.

    ``others`` are files to decode as well, before them.
    """
    decoder = DECODERS[name]
    for data in corpus(name):
        fault_of(decoder, decoder.reseal(data, decoder.path))
    limit_process()
    end_s = None if seconds is None else time.monotonic() + seconds
    faults: dict[str, Fault] = {}
    given = ((other.name, other.read_bytes()) for other in others)
    for what, data in chain(given, variants(name, count, seed)):
        (folder / "current").write_bytes(data)
        reason = fault_of(decoder, data)
        if reason is not None and reason[:60] not in faults:
            kept = folder / what.replace(" ", "-").replace("/", "-")
            kept.write_bytes(data)
            faults[reason[:60]] = Fault(str(kept), reason)
        if len(faults) >= _MOST_FAULTS or (end_s is not None and time.monotonic() > end_s):
            break
    return list(faults.values())


def faults_apart(name: str, chosen: argparse.Namespace) -> list[Fault]:
    """Run a decoder in a process forked for it; the input on which that one dies is a fault, too."""
    folder = chosen.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    told = folder / "faults.json"
    child = os.fork()
    if not child:
        found = run(name, chosen.count, chosen.seed, chosen.seconds, folder, chosen.input)
        told.write_text(json.dumps([asdict(fault) for fault in found]))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        ended = os.waitstatus_to_exitcode(status)
        return [Fault(str(folder / "current"), f"the process ended with {ended}")]
    return [Fault(**fault) for fault in json.loads(told.read_text())]


def main() -> None:
    """Run by arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("decoders", nargs="+", choices=DECODERS)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=None)
    parser.add_argument("--input", type=Path, action="append", default=[])
    parser.add_argument("--folder", type=Path, required=True)
    chosen = parser.parse_args()
    # To load the program takes longer than most decoders.
    found = {name: faults_apart(name, chosen) for name in chosen.decoders}
    json.dump({name: [asdict(fault) for fault in faults] for name, faults in found.items()}, sys.stdout)


if __name__ == "__main__":
    main()
