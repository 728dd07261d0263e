"""Datasets of `antiphon export`, read by the WebDataset library as it is installed: `make soak`.

    python -m tests.soak.dataset [--environments FOLDER]

The library (0.6 MB; with it braceexpand and PyYAML) is no dependency: it is installed into an
environment of its own. It reads a shard of each recording below, plain and by `.decode()`, and
each sample has to be the one that the tests read. It prints what was found, and exits with 1 where
the library reads something else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from tests.replay.exported import AUDIO, VIDEO, exported
from tests.replay.test_export_formats import samples_in

SCRIPT: Final = Path(__file__).parents[1] / "unmodified" / "webdataset_shard.py"
PACKAGES: Final = ("webdataset==1.0.2", "soundfile", "numpy")
RUN_S: Final = 120


def prepare(folder: Path) -> Path:
    """Install the library, unless it is there; return its interpreter."""
    python = folder / "webdataset" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / "webdataset")], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
        subprocess.run(pip, check=True, stdout=subprocess.DEVNULL)
    return python


def read(python: Path, shard: Path) -> list[dict[str, Any]]:
    """Read a shard by the library."""
    words = [str(python), "-W", "ignore", str(SCRIPT), str(shard)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=RUN_S)
    return [json.loads(line) for line in done.stdout.splitlines()]


def expected(data: bytes) -> list[dict[str, Any]]:
    """The same, as the tests read it."""
    found = []
    for key, files in samples_in(data).items():
        told: dict[str, Any] = {"key": key, "json": json.loads(files["json"]), "files": {}}
        for name in sorted(files.keys() - {"json"}):
            told["files"][name] = hashlib.blake2b(files[name]).hexdigest()
            if name.endswith(".wav"):
                rate_hz = 16_000 if name == "user.wav" else 24_000
                told[name] = [(len(files[name]) - 56) // 4, rate_hz]
        found.append(told)
    return found


def main() -> None:
    """Read all shards; say whether they are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.soak.dataset")
    parser.add_argument("--environments", type=Path)
    given = parser.parse_args().environments
    found: dict[str, Any] = {"packages": PACKAGES, "recordings": {}}
    with tempfile.TemporaryDirectory() as made:
        python = prepare(given or Path(made))
        for log in (VIDEO, AUDIO):
            data, shard = exported(log, "dataset"), Path(made) / "shard.tar"
            shard.write_bytes(data)
            samples, wanted = read(python, shard), expected(data)
            found["recordings"][log.name] = {"samples": len(samples), "equal": samples == wanted}
    print(json.dumps(found, indent=2))
    good = all(it["samples"] and it["equal"] for it in found["recordings"].values())
    sys.exit(not good)


if __name__ == "__main__":
    main()
