"""The command `recover`: what it makes of a folder after a crash, what it refuses, exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from recorder.format.format import SUFFIX, Record
from recorder.read.reader import LogReader
from recorder.repair import verify
from replay.rerun.folder import replay_log
from runtime.cli import main
from tests.golden.logs import FOLDER
from tests.recorder.test_samples import block_offsets

GOLDEN = FOLDER / f"v1-realtime-many-units{SUFFIX}"


def call(*arguments: object) -> Result:
    """Run `antiphon recordings recover`; whatever happens, it must not end in a traceback."""
    result = CliRunner().invoke(main, ["recordings", "recover", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def told(*arguments: object) -> Any:
    result = call(*arguments, "--json")
    body = json.loads(result.stdout)
    assert body["exit_code"] == result.exit_code
    return body


def records(path: Path) -> list[Record]:
    with LogReader(path) as reader:
        return [item for item in reader if isinstance(item, Record)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a killed server and a bad disk left: a log each of every kind, by its name."""
    data = GOLDEN.read_bytes()
    at = block_offsets(data)
    half = at[len(at) // 2]
    bad = bytearray(data)
    bad[half + 80] ^= 1
    logs = {"sound": data, "torn": data[: half + 30], "rotten": bytes(bad), "junk": b"no log" * 99}
    for name, content in logs.items():
        (tmp_path / f"{name}{SUFFIX}").write_bytes(content)
    return tmp_path


def log(folder: Path, name: str) -> Path:
    return folder / f"{name}{SUFFIX}"


def test_a_torn_log_gets_an_end(folder: Path) -> None:
    """After a crash no recording could be archived, compacted or listed as what it is."""
    result = call(log(folder, "torn"))
    assert (result.exit_code, result.stderr) == (0, "")
    made = log(folder, "torn-recovered")
    assert f"{made}: " in result.stdout
    assert "30 bytes of an incomplete block" in result.stdout
    assert verify(made).state == "finished"
    assert replay_log(made).result == "identical"
    assert records(made)[:-1] == records(log(folder, "torn"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_it_belongs_to_whom_the_log_belongs(folder: Path) -> None:
    """A server with a user of its own could not read what root recovered for it."""
    os.chown(log(folder, "torn"), 12, 34)
    log(folder, "torn").chmod(0o640)
    assert call(log(folder, "torn")).exit_code == 0
    status = log(folder, "torn-recovered").stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o777) == (12, 34, 0o640)


def test_lost_records_end_it_unless_salvaged(folder: Path, tmp_path: Path) -> None:
    """A log with a hole would replay as if it were whole; or what follows the hole is lost."""
    result = call(log(folder, "rotten"))
    assert result.exit_code == 1
    assert "missing records: " in result.stdout
    kept = len(records(log(folder, "rotten-recovered"))) - 1
    assert f": {kept} records kept, and an end; " in result.stdout
    short = records(log(folder, "rotten-recovered"))
    assert replay_log(log(folder, "rotten-recovered")).result == "identical"
    whole = tmp_path / "whole.session.zst"
    body = told("--salvage", "--output", whole, log(folder, "rotten"))
    assert body["exit_code"] == 1
    assert len(records(whole)) == len(records(log(folder, "sound"))) > len(short)
    assert replay_log(whole).result == "damaged"
    assert replay_log(log(folder, "rotten-recovered")).result == "identical"


def test_a_folder_is_recovered_once(folder: Path) -> None:
    """After a crash an operator would go from log to log, and make a second copy at each try."""
    first = told(folder)
    assert {Path(it["log"]).name.removesuffix(SUFFIX): it["result"] for it in first["logs"]} == {
        "junk": "refused",
        "rotten": "recovered",
        "sound": "sound",
        "torn": "recovered",
    }
    assert first["exit_code"] == 2
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(files) == 6
    second = told(folder)
    assert sorted(it["result"] for it in second["logs"]) == [
        *("recovered before", "recovered before", "refused", "sound", "sound", "sound")
    ]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    log(folder, "junk").unlink()
    assert "3 sound, 2 recovered before" in "".join(call(folder).stdout.splitlines()[-1:])
    assert told(folder)["exit_code"] == 0


def test_json_says_what_became_of_each(folder: Path) -> None:
    """A script would have to read sentences."""
    (it,) = told(log(folder, "rotten"))["logs"]
    kept = records(log(folder, "rotten-recovered"))
    assert it == {
        "log": str(log(folder, "rotten")),
        "result": "recovered",
        "output": str(log(folder, "rotten-recovered")),
        "records": len(kept) - 1,
        "units": kept[-1].fields["units"],
        "records_lost": len(records(log(folder, "sound"))) - len(kept),
        "damage": 1,
        "tail_bytes": 0,
        "reason": "recovered",
        "file_bytes": log(folder, "rotten-recovered").stat().st_size,
        "error": None,
    }


def test_logs_that_are_being_written_are_left_alone(folder: Path) -> None:
    """A running server's sessions would each get a false end."""
    with log(folder, "torn").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = call(log(folder, "torn"))
        assert result.exit_code == 2
        assert result.stderr.count("\n") == 1
        assert "a server is writing it" in result.stderr
        log(folder, "junk").unlink()
        log(folder, "rotten").unlink()
        body = told(folder)
        assert (body["exit_code"], body["logs"][1]["result"]) == (0, "being written")
    assert not log(folder, "torn-recovered").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.session.zst"], "no such log"),
        (["empty"], "no *.session.zst in it"),
        (["junk.session.zst"], "this is not a recording"),
        (["torn.session.zst", "--output", "sound.session.zst"], "it exists"),
        (["torn.session.zst", "--output", "nowhere/a.session.zst"], "there is no folder nowhere"),
        (["odd.name"], "give --output"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    """A wrong path would end in a traceback, or overwrite what is there."""
    monkeypatch.chdir(folder)
    (folder / "empty").mkdir()
    (folder / "odd.name").write_bytes(log(folder, "torn").read_bytes())
    before = {path.name for path in folder.iterdir()}
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert {path.name for path in folder.iterdir()} == before
    assert verify(log(folder, "sound")).state == "finished"


def test_output_is_of_one_log(folder: Path) -> None:
    """Two logs would be written over each other."""
    logs = log(folder, "torn"), log(folder, "rotten")
    assert "is for one LOG" in call(*logs, "--output", folder / "a").stderr
    assert "is for one LOG" in call(folder, "--output", folder / "a").stderr


def test_what_is_killed_amid_it_leaves_no_half_log(folder: Path) -> None:
    """A half log would lie there under the name of a whole one."""
    code = (
        "import os, signal\n"
        "from recorder.repair import Rewriter\n"
        "Rewriter.finish = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from runtime.cli import main\n"
        f"main(['recordings', 'recover', {str(log(folder, 'torn'))!r}])"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -signal.SIGTERM
    assert not log(folder, "torn-recovered").exists()
    assert call(log(folder, "torn")).exit_code == 0


def test_a_link_is_said_to_be_one(folder: Path) -> None:
    """Somebody would look for a loop of links where there is one link to a log."""
    link = log(folder, "link")
    link.symlink_to(log(folder, "torn"))
    result = call(link)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"{link}: it is a symbolic link")


def test_help_teaches() -> None:
    """Nobody would know what an exit code means."""
    text = call("--help").stdout
    assert "Examples:" in text
    assert all(f"  {code}  " in text for code in (0, 1, 2))
