"""Coverage-guided fuzzing: atheris keeps inputs that reach new lines of the program and mutates them further.

``python -m tests.fuzz.guided DECODER --seconds T --folder F`` exits with an error on the first fault. Its input is in
``F/current``. ``--seed`` sets the seed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["trinitylake_ops", "pyiceberg", "fastavro"]):
    from tests.fuzz.decoders import DECODERS, corpus, regressions
    from tests.fuzz.mutations import mutate_file
    from tests.fuzz.run import fault_of, limit_process

_MAX_INPUT_BYTES = 1 << 16


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("decoder", choices=DECODERS)
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    decoder = DECODERS[options.decoder]
    seeds = options.folder / "seeds"
    seeds.mkdir(exist_ok=True)
    for number, data in enumerate((*corpus(options.decoder), *regressions(options.decoder).values())):
        (seeds / str(number)).write_bytes(data)
        fault_of(decoder, decoder.reseal(data, decoder.path))
    current = options.folder / "current"

    def test_one_input(data: bytes) -> None:
        data = decoder.reseal(data, decoder.path)
        current.write_bytes(data)
        reason = fault_of(decoder, data)
        if reason is not None:
            print(f"{current}: {reason}", file=sys.stderr)
            raise AssertionError(reason)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            return atheris.Mutate(data, max_size)
        try:
            return mutate_file(data, decoder.mutate, rng)[:max_size]
        except Exception:  # noqa: BLE001 - the structure of the file is too damaged
            return atheris.Mutate(data, max_size)

    limit_process()
    arguments = [f"-max_total_time={options.seconds}", f"-seed={options.seed % 2**32 or 1}", "-print_final_stats=0"]
    arguments += [f"-max_len={_MAX_INPUT_BYTES}", "-rss_limit_mb=0", f"-artifact_prefix={options.folder}{os.sep}"]
    atheris.Setup([sys.argv[0], *arguments, str(seeds)], test_one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
