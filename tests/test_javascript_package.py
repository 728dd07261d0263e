"""The npm package of the JavaScript client: its types, and an installation from its tarball."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.project.packed import VERSION

WEB: Final = Path(__file__).parents[1] / "runtime" / "web"
NPM: Final = shutil.which("npm")
TSC: Final = WEB / "node_modules" / ".bin" / "tsc"
WAIT_S: Final = 120

needs_npm = pytest.mark.skipif(NPM is None, reason="there is no npm to make a package with")
needs_tsc = pytest.mark.skipif(
    not TSC.exists(), reason="there is no tsc: run `npm ci` in runtime/web to check types"
)


def run(command: Sequence[object], folder: Path) -> str:
    """Run a command without a network, and return what it said."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_tsc
def test_types_hold() -> None:
    """The compiler finds nothing in the client and in the console."""
    run([TSC, "--project", "jsconfig.json"], WEB)


@needs_tsc
def test_the_declarations_are_current(tmp_path: Path) -> None:
    """`npm run types` was forgotten: programs would be checked against another client."""
    run([TSC, "--project", "types.json", "--outDir", tmp_path], WEB)
    made = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert made == {path.name: path.read_text() for path in (WEB / "types").iterdir()}


@needs_npm
def test_the_package_is_installed_and_used(tmp_path: Path) -> None:
    """The tarball holds all that its entries name, and nothing that is only for its authors."""
    assert NPM is not None
    offline = ("--offline", "--no-audit", "--no-fund", "--cache", tmp_path / "cache")
    (packed,) = json.loads(
        run([NPM, "pack", "--json", "--pack-destination", tmp_path, *offline], WEB)
    )
    names = {file["path"] for file in packed["files"]}
    scripts = {path.name for path in WEB.glob("*.js")}
    types = {f"types/{path.name}" for path in (WEB / "types").iterdir()}
    assert names == {*scripts, *types, "package.json", "README.md"}
    (tmp_path / "package.json").write_text('{"private": true, "type": "module"}')
    run([NPM, "install", tmp_path / packed["filename"], *offline], tmp_path)
    (tmp_path / "use.mjs").write_text(
        'import { connect, MisuseError } from "@antiphon/client";\n'
        'import { Camera, Conversation, Microphone, Speaker } from "@antiphon/client/media";\n'
        'await connect("nowhere", { mode: "audio" }).catch((error) => {\n'
        "  if (!(error instanceof MisuseError)) throw error;\n"
        "  const made = [Camera, Conversation, Microphone, Speaker];\n"
        "  console.log(made.map(({ name }) => name).join());\n"
        "});\n"
    )
    said = run([shutil.which("node") or "node", "use.mjs"], tmp_path)
    assert said.strip() == "Camera,Conversation,Microphone,Speaker"


@needs_tsc
@needs_npm
def test_a_program_is_checked_against_the_types(tmp_path: Path) -> None:
    """A misspelt event or option is found before the program runs."""
    client = tmp_path / "node_modules" / "@antiphon" / "client"
    shutil.copytree(WEB, client, ignore=shutil.ignore_patterns("node_modules", "console"))
    program = (
        'import { Conversation } from "@antiphon/client/media";\n'
        'const talk = new Conversation("ws://127.0.0.1", { instructions: "Be brief." });\n'
        'talk.on("caption", ({ text }) => console.log(text.length));\n'
    )
    (tmp_path / "package.json").write_text('{"private": true, "type": "module"}')
    (tmp_path / "good.ts").write_text(program)
    (tmp_path / "bad.ts").write_text(program.replace('"caption"', '"captions"'))
    flags = (
        "--noEmit",
        "--strict",
        "--module",
        "nodenext",
        "--target",
        "es2023",
        "--lib",
        "es2023,dom",
    )
    run([TSC, *flags, "good.ts"], tmp_path)
    with pytest.raises(AssertionError, match="captions"):
        run([TSC, *flags, "bad.ts"], tmp_path)


def test_the_package_has_the_version_of_the_server() -> None:
    """A client's author could not tell which server it belongs to."""
    assert json.loads((WEB / "package.json").read_text())["version"] == VERSION
