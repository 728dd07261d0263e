"""`antiphon dev schema`: the document is valid AsyncAPI, and says what the server does."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner, Result

from docs.site.protocol import reference
from protocol.values import errors
from protocol.values.errors import CLOSE_MEANINGS, MEANINGS, ErrorCode, LocalProtocolError
from protocol.values.limits import Mode
from protocol.values.messages import Closed, EndReason
from protocol.values.state import TRANSITIONS, Gate, SessionKind
from protocol.wire.dialects import DIALECTS, MODES_OF, OPENING, TRANSCRIPTION
from runtime.cli import main
from runtime.commands.schema import CHANNELS, ENDS, GATES, asyncapi
from runtime.serve.routing import route

ROOT = Path(__file__).resolve().parents[3]
VALIDATOR = ROOT / "tests" / "schema"
INSTALL_S = 240
"""npm fetches some 170 small packages, once for each lock file."""
NO_REGISTRY = re.compile(
    r"ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|timeout"
)
"""What npm says where the registry cannot be reached; anything else is a mistake of ours."""
ERROR, WARNING = 0, 1

Found = list[tuple[int, str, str, str]]


def antiphon(*arguments: str) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(main, arguments)


@cache
def schema() -> str:
    """What `antiphon dev schema` prints."""
    shown = antiphon("dev", "schema")
    assert shown.exit_code == 0, shown.output
    return shown.stdout


# -- the public validator -------------------------------------------------------------------------


@cache
def installed() -> Path:
    """Install the validator below `build/`, or skip where there is no Node.js or no registry."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node.js with npm is not installed: the public AsyncAPI validator needs it")
    lock = (VALIDATOR / "package-lock.json").read_bytes()
    folder = ROOT / "build" / f"asyncapi-{hashlib.sha256(lock).hexdigest()[:16]}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(VALIDATOR / name, folder)
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1"]
        made = run(["npm", "ci", *options], folder, INSTALL_S)
        if made.returncode and NO_REGISTRY.search(made.stderr):
            pytest.skip("the npm registry cannot be reached: it has the public AsyncAPI validator")
        assert made.returncode == 0, made.stderr
        (folder / "done").touch()
    return folder


def run(command: list[str], folder: Path, wait_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=wait_s, check=False
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What the validator finds in our document and in three spoilt ones."""
    spoilt = [asyncapi() for _ in range(3)]
    spoilt[0]["operations"]["realtime-chat-send"]["action"] = "shout"
    spoilt[1]["components"]["messages"]["realtime.error"]["payload"]["type"] = "thing"
    spoilt[2]["channels"]["chat"]["messages"]["legacy-chat.done"]["$ref"] = "#/components/none"
    here = tmp_path_factory.mktemp("schema")
    ours = written(here, "a.json", schema())
    return validated(ours, *(written(here, f"{n}.json", each) for n, each in enumerate(spoilt)))


def validated(*paths: Path) -> list[Found]:
    """What the validator finds in each file."""
    folder = installed()
    shutil.copy(VALIDATOR / "validate.mjs", folder)
    made = run(["node", "validate.mjs", *map(str, paths)], folder, 120)
    assert made.returncode == 0, made.stderr
    return [
        [(severity, code, path, text) for severity, code, path, text in json.loads(line)]
        for line in made.stdout.splitlines()
    ]


def wrong(found: Found) -> Found:
    return [each for each in found if each[0] <= WARNING]


def written(folder: Path, name: str, document: Any) -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return path


@pytest.mark.soak
def test_the_public_validator_finds_nothing_wrong(found: list[Found]) -> None:
    """Tools that generate clients or documentation would refuse the document."""
    assert wrong(found[0]) == []


@pytest.mark.soak
def test_the_public_validator_finds_mistakes(found: list[Found]) -> None:
    """The document would be called valid whatever is in it."""
    assert [bool(wrong(each)) for each in found[1:]] == [True] * 3


# -- the document ---------------------------------------------------------------------------------


def test_the_documents_are_the_same_in_every_process() -> None:
    """The reference would change from one run to the next, and its test fail by chance."""
    code = f"from {__name__} import *; print(schema(), reference(), end='')"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    made = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, check=True
    )
    assert made.stdout == f"{schema()} {reference()}"


def test_the_reference_in_docs_is_up_to_date() -> None:
    """A client's author would read of fields as they were some versions ago."""
    path = ROOT / "docs" / "protocol.md"
    hint = "run: python -m docs.site.protocol"
    assert path.read_text("utf-8") == reference(), hint


def test_the_document_is_written_to_a_file(tmp_path: Path) -> None:
    """`--output` would leave nothing behind."""
    path = tmp_path / "antiphon.json"
    shown = antiphon("dev", "schema", "--output", str(path))
    assert (shown.exit_code, shown.output) == (0, "")
    assert json.loads(path.read_text("utf-8")) == json.loads(schema())


def test_a_file_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    """A typing error in a path would give a traceback."""
    shown = antiphon("dev", "schema", "--output", str(tmp_path / "none" / "a.json"))
    assert shown.exit_code == 1
    assert shown.output.count("\n") == 1
    assert "No such file or directory" in shown.output


# -- the document and the server agree ------------------------------------------------------------


def address_of(name: str, mode: Mode) -> tuple[str, dict[str, Sequence[str]]]:
    """Where a client connects for a dialect and a mode, by the document."""
    channel = next(each for each in CHANNELS if name in each.dialects)
    label = "adx_1" if mode == "audio" else "omni_1"
    queries = {
        "realtime": {"mode": (mode,)},
        "openai": {"model": ("tiny",)},
        "openai-transcription": {"intent": ("transcription",)},
        "vllm-omni": {"duplex": ("1",), "mode": (mode,)},
    }
    query: dict[str, Sequence[str]] = dict(queries.get(channel.name, {}))
    return channel.address.replace("{session_id}", label), query


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, modes in MODES_OF.items() for mode in modes]
)
def test_the_endpoints_are_the_server_s(name: str, mode: Mode) -> None:
    """Clients would be told to connect where nothing is, or where another mode is."""
    path, query = address_of(name, mode)
    found = route(path, query, get_args(Mode), default="video")
    assert found.mode == mode
    assert found.dialect in {DIALECTS[name], OPENING, TRANSCRIPTION}


def test_every_dialect_is_described() -> None:
    """A dialect that is served would be missing from the document."""
    assert MODES_OF.keys() == DIALECTS.keys()
    assert {name for channel in CHANNELS for name in channel.dialects} == DIALECTS.keys()


def test_every_message_has_an_operation() -> None:
    """A message would be in the document, and nothing say who sends it."""
    document = asyncapi()
    used = {
        each["$ref"].rpartition("/")[2]
        for operation in document["operations"].values()
        for each in operation["messages"]
    }
    assert used == document["components"]["messages"].keys()


def test_every_state_of_the_table_is_in_the_document() -> None:
    """A client's author would not know a state that the server can be in."""
    for session_kinds in asyncapi()["x-antiphon-states"].values():
        for name, found in session_kinds.items():
            session_kind = SessionKind(name)
            rows = {state.value for state, row in TRANSITIONS[session_kind].items() if row}
            assert {move["from"] for move in found["transitions"]} == rows
            assert found["reception"].keys() <= {
                gate.value for gate in (*GATES[session_kind], Gate.OPEN, Gate.STEERED)
            }


def test_every_code_has_a_meaning() -> None:
    """A client's author would meet a code that the reference does not explain."""
    closes = {
        value
        for name, value in vars(errors).items()
        if name.startswith("CLOSE_") and isinstance(value, int)
    }
    assert MEANINGS.keys() == {*ErrorCode}
    assert CLOSE_MEANINGS.keys() == closes


@pytest.mark.parametrize("reason", get_args(EndReason))
def test_every_end_that_is_told_has_a_meaning(reason: EndReason) -> None:
    """A client would be told of an end that the reference does not explain."""
    told = False
    for dialect in DIALECTS.values():
        try:
            told |= bool(dialect.encode(Closed(session_id="s", reason=reason)))
        except LocalProtocolError:
            continue
    assert told is (reason in ENDS)


def test_codes_of_the_wire_stand_in_the_reference() -> None:
    """Whoever searches the reference for an error's code would not find it."""
    text = reference()
    assert all(f"| `{code}` |" in text for code in ErrorCode)
    assert all(f"| {code} |" in text for code in CLOSE_MEANINGS)


def test_links_of_the_reference_lead_somewhere() -> None:
    """A reader who clicks would stay where they are."""
    text = reference()
    heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors
