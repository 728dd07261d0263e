"""Hold our modules to the public code's numbers: one line an array, with its largest deviation.

    python -m tests.voice --voice a --prompt 40
    python -m tests.voice --steps 4
    python -m tests.voice --time

Exits with 1 if an array deviates by more than its bound. `--steps` computes in fixed shapes, as on
a GPU; `--time` measures instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from tests.voice.golden import GOLDEN, WEIGHTS, deviations, load_weights
from tests.voice.timing import figures


def main(arguments: Sequence[str]) -> int:
    """Run the check; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.voice", description=__doc__)
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="a file that draws weights")
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="the public code's numbers")
    parser.add_argument("--voice", default="a", help="the voice's name in both files")
    parser.add_argument("--prompt", type=int, default=40, help="codes of its prompt")
    parser.add_argument("--steps", type=int, help="sessions of a fixed shape, mostly empty")
    parser.add_argument("--time", action="store_true", help="measure instead, on one core")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    weights = load_weights(options.weights)
    golden = {}
    for path in (GOLDEN, options.golden):  # The first has the weights' names, if the other has not.
        with np.load(path, allow_pickle=False) as file:
            golden |= {name: file[name] for name in file.files}
    if options.time:
        for line in figures(weights, golden, options.voice, options.prompt):
            print(line, flush=True)
        return 0
    if not any(name.startswith(f"{options.voice}.") for name in golden):
        parser.error(f"{options.golden} has no voice {options.voice!r}")
    status = 0
    sizes = () if options.steps is None else (options.steps,)
    for found in deviations(weights, golden, options.voice, options.prompt, sizes):
        verdict = "" if found.is_small else f"  above {found.bound:.0e}"
        print(f"{found.name:32} {found.value:.2e}{verdict}", flush=True)
        status |= not found.is_small
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
