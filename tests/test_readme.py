"""The README and the pages of docs/ do what they say; `tests/project/shown.py` runs them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import trustme

import antiphon as antiphon_package
from runtime import RUN
from tests.live.servers import live_server
from tests.project.shown import Runner, blocks
from tests.sessions.in_memory import pcm as make_pcm

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
SPEECH = ROOT / "fixtures" / "speech" / "demo.wav"
BLOCKS = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
"""Console blocks: `$ antiphon ...` and what it prints at least."""
EXAMPLES = [
    (match[1], match[2].splitlines())
    for block in BLOCKS
    for match in re.finditer(r"\$ antiphon (.*)\n((?:(?!\$ ).*\n)*)", block)
]
WAIT_S = 120
"""Until a model is loaded on a busy machine."""


def antiphon(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = (*RUN, *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=folder, check=False
    )


def test_there_are_examples() -> None:
    """The README shows nothing, and the tests below test nothing."""
    assert len(EXAMPLES) >= 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run examples in, as the root of the repository is one."""
    made = tmp_path_factory.mktemp("readme")
    for name in ("fixtures", "examples"):
        (made / name).symlink_to(ROOT / name)
    for name in ("demo/static", "voices", "nightly"):
        (made / name).mkdir(parents=True)
    for name in ("v1-live-fork", "v1-duplex-v1-audio", "v1-realtime-video"):
        shutil.copy(ROOT / "fixtures" / "logs" / f"{name}.session.zst", made / "nightly")
    shutil.copy(ROOT / "deploy" / "antiphon.toml", made)
    shutil.copy(SPEECH, made / "voices" / "anna.wav")
    certificate = trustme.CA().issue_cert("localhost")
    certificate.private_key_pem.write_to_path(made / "server.key")
    certificate.cert_chain_pems[0].write_to_path(made / "server.crt")
    return made


@contextmanager
def served(folder: Path, line: str) -> Iterator[tuple[str, list[str]]]:
    """Run an example that serves, on a free port; give its address, and what it printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = (*RUN, *shlex.split(line), "--port", "0")
    said = folder / "said.txt"
    with (
        said.open("w") as stdout,
        subprocess.Popen(command, stdout=stdout, env=environment, cwd=folder) as process,
    ):
        give_up = time.monotonic() + WAIT_S
        try:
            while "\nopen to " not in (text := said.read_text()):
                assert process.poll() is None, text
                assert time.monotonic() < give_up, text
                time.sleep(0.05)
            address = re.search(r"wss?://[^/]*:\d+", text)
            assert address is not None
            yield address[0], text.splitlines()
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0


@pytest.fixture(scope="module")
def example_server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The README's server, with a spoken conversation recorded, as guides want it of "Start"."""
    (line,) = (line for line, _ in EXAMPLES if line.startswith("serve"))
    with served(folder, line) as found:
        talked = antiphon("talk", str(SPEECH), "--fast", "--url", found[0], folder=folder)
        assert talked.returncode == 0, talked.stderr
        yield found


def test_its_server_prints_what_it_shows(
    example_server: tuple[str, list[str]], folder: Path
) -> None:
    """A new user waits for a line that never comes."""
    url, printed = example_server
    (expected,) = (printed for line, printed in EXAMPLES if line.startswith("serve"))
    port = url.rpartition(":")[2]
    for line in expected:
        assert line.replace("8006", port).replace("/srv/antiphon", str(folder)) in printed


PAGES = (
    *("README.md", "examples/README.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
)
SHOWN = [block for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)])
def test_a_page_does_what_it_says(
    page: str, example_server: tuple[str, list[str]], folder: Path
) -> None:
    """A reader types what a page shows, and sees something else."""
    (folder / "keys.toml").unlink(missing_ok=True)  # a page makes its own
    runner = Runner(folder=folder, url=example_server[0])
    for block in blocks(page):
        runner.run(block)


def test_most_blocks_are_run() -> None:
    """Whatever fails could be marked as not run, or as run by a test that is gone."""
    elsewhere = [re.search(r"tests/[\w/]+(?:\.py)?", block.why_not) for block in SHOWN]
    assert all((ROOT / found[0]).exists() for found in elsewhere if found)
    run = [not block.why_not or found for block, found in zip(SHOWN, elsewhere, strict=True)]
    assert sum(map(bool, run)) >= 0.75 * len(SHOWN)
    assert all(len(block.why_not.split()) >= 3 for block in SHOWN if block.why_not)


def test_its_server_for_others_serves(folder: Path) -> None:
    """A server that others can reach would not start as it is written."""
    (block,) = (each for each in blocks("README.md") if each.language == "sh")
    add, serve = (line.removeprefix("antiphon ") for line, _ in block.commands)
    (folder / "keys.toml").unlink(missing_ok=True)
    assert antiphon(*shlex.split(add), folder=folder).returncode == 0
    with served(folder, f"{serve} --model scripted --no-record") as (url, _):
        assert url.startswith("wss://0.0.0.0:")


@pytest.fixture(scope="module")
def scripted() -> Iterator[str]:
    """The address of a server whose answers are known."""
    options = ("--no-record", "--limit-audio-s", "6", "--served-model-name", "tiny")
    with live_server(*options) as server:
        yield server.url.removesuffix("/v1/realtime")


def test_its_client_works(scripted: str) -> None:
    """A client copied out of the README does not run."""
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    printed: list[str] = []
    here = snippet.replace("ws://127.0.0.1:8006", scripted)
    assert here != snippet
    body = textwrap.indent(here, "    ")
    names: dict[str, Any] = {"print": lambda *said, **_: printed.append(*said)}
    exec(f"async def main():\n{body}", names)
    anyio.run(names["main"])
    assert "".join(printed) == "turn 0: good morning (0 pictures, 0 sounds)Listen"


def run_docstring(number: int, url: str, **names: object) -> None:
    """Run an example of `import antiphon`."""
    assert antiphon_package.__doc__ is not None
    examples = re.split(r"\n\n(?=    )", antiphon_package.__doc__)[1:]
    example = textwrap.dedent(re.split(r"\n\n(?=\S)", examples[number])[0])
    here = example.replace("ws://127.0.0.1:8006", url)
    everything: dict[str, Any] = {"antiphon": antiphon_package, "url": url, **names}
    exec(f"async def main():\n{textwrap.indent(here, '    ')}", everything)

    async def bounded() -> None:
        with anyio.fail_after(WAIT_S):
            await everything["main"]()

    anyio.run(bounded)


def test_the_examples_of_its_docstring_end(
    scripted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A program that was begun with one of them hangs."""
    played: list[int] = []
    pcm = np.frombuffer(make_pcm(5), "<f4")
    run_docstring(0, scripted, pcm=pcm, play=lambda samples: played.append(len(samples)))
    assert sum(played) > 0
    capsys.readouterr()
    run_docstring(1, scripted)
    assert capsys.readouterr().out == "turn 0: Good morning! (0 pictures, 0 sounds)"
    run_docstring(2, scripted, pcm=pcm)
    assert capsys.readouterr().out != ""


def test_the_package_says_its_version() -> None:
    """A bug report could not name it, and nothing would tell two installations apart."""
    assert antiphon("--version").stdout.split()[-1] == antiphon_package.__version__


def test_its_links_lead_somewhere() -> None:
    """A reader follows a link into nothing."""
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
