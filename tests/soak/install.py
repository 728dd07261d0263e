"""Antiphon, installed from an index into empty environments: sizes, times, and what then runs.

    python -m tests.soak.install [--out FOLDER]

The wheel is built and installed, without extras and then with `server`, in the versions of
constraints.txt, each in an environment of its own without pip. The first runs the tools for
recordings, the second serves `tiny` and asks it a question. CPU times are the least of several
runs; `load` is the machine's at the start. What was found goes to `install.json`; it exits with 1
where something does not run, or where an installation without extras is larger than
`BASE_BYTES_MAX` or has torch.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any, Final

from tests.project.evidence import add_out
from tests.project.packed import ROOT, SDIST, WHEEL, build, run

LOG: Final = ROOT / "fixtures" / "logs" / "v1-realtime-video.session.zst"
SPEECH: Final = ROOT / "fixtures" / "speech" / "demo.wav"
BASE_BYTES_MAX: Final = 150_000_000
INSTALL_S: Final = 1_800
REPEATS: Final = 7
TOOLS: Final = (
    ("recordings", "verify", LOG),
    ("recordings", "inspect", LOG),
    ("replay", LOG),
    ("recordings", "view", LOG, "--output", "view.html"),
    ("export", LOG, "--output", "call.wav"),
    ("diff", LOG, LOG),
    ("recordings", "redact", LOG, "--output", "less.session.zst"),
    ("eval", LOG),
)
STARTS: Final = {
    "antiphon --help": ("antiphon", "--help"),
    "antiphon recordings verify LOG": ("antiphon", "recordings", "verify", LOG),
    "python -c 'import antiphon'": ("python", "-c", "import antiphon"),
    "python -c pass": ("python", "-c", "pass"),
}


def bytes_of(folder: Path) -> int:
    """The bytes of all files below a folder; a link counts nothing."""
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )


def installed(folder: Path, wheel: Path, extra: str) -> dict[str, Any]:
    """Install the wheel into a new environment there; say what that took."""
    venv.create(folder, with_pip=False)
    empty, began = bytes_of(folder), time.monotonic()
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet")
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    subprocess.run(
        [*map(str, pip), "--constraint", str(ROOT / "constraints.txt"), wanted],
        check=True,
        timeout=INSTALL_S,
    )
    took_s = time.monotonic() - began
    (site,) = folder.glob("lib/python*/site-packages")
    pyc = sum(path.stat().st_size for path in site.rglob("*.pyc"))
    return {
        "packages": len([*site.glob("*.dist-info")]),
        "installed_mb": round((bytes_of(folder) - empty) / 1e6, 1),
        "of_that_bytecode_mb": round(pyc / 1e6, 1),
        "install_s": round(took_s, 1),
        "has_torch": (site / "torch").exists(),
    }


def cpu_ms(environment: Path, *command: str | Path) -> int:
    """The least CPU time of a command, in some runs of it."""
    found = []
    for _ in range(REPEATS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run(environment / "bin" / command[0], *command[1:], folder=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return round(1000 * min(found))


def tools(environment: Path, folder: Path) -> dict[str, int]:
    """The exit code of each tool for recordings."""
    command = environment / "bin" / "antiphon"
    return {str(words[0]): run(command, *words, folder=folder).returncode for words in TOOLS}


def demonstrated(environment: Path, folder: Path) -> dict[str, Any]:
    """Serve `tiny`, talk, record and replay, as `antiphon demo` does."""
    began = time.monotonic()
    words = ("demo", "--speech", SPEECH, "--fast", "--record", folder / "recordings", "--json")
    done = run(environment / "bin" / "antiphon", *words, folder=folder)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    return {"exit_code": done.returncode, "took_s": round(time.monotonic() - began, 1)}


def main() -> None:
    """Install, measure and write `install.json`."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.soak.install")
    add_out(parser)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        build(folder, "wheel", "sdist")
        base, server = folder / "base", folder / "server"
        found = {
            "what": "the wheel installed from an index, in the versions of constraints.txt",
            "load": round(os.getloadavg()[0], 1),
            "wheel_mb": round((folder / WHEEL).stat().st_size / 1e6, 2),
            "sdist_mb": round((folder / SDIST).stat().st_size / 1e6, 2),
            "base": installed(base, folder / WHEEL, ""),
            "tools": tools(base, folder),
            "cpu_ms": {name: cpu_ms(base, *words) for name, words in STARTS.items()},
            "server": installed(server, folder / WHEEL, "server"),
            "demo": demonstrated(server, folder),
        }
    is_small = found["base"]["installed_mb"] * 1e6 <= BASE_BYTES_MAX
    is_light = is_small and not found["base"]["has_torch"]
    runs = not any(found["tools"].values()) and found["demo"]["exit_code"] == 0
    text = json.dumps({"good": is_light and runs, **found}, indent=2) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "install.json").write_text(text, "utf-8")
    print(text, end="")
    sys.exit(not (is_light and runs))


if __name__ == "__main__":
    main()
