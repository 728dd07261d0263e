"""A session's page: it is told what was recorded, placed where it was heard, and harmless."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import av
import click
import numpy as np
import pybase64
import pytest
import simplejpeg
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values.limits import NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from protocol.wire.audio import Resampler
from recorder.format.format import Record
from recorder.read.reader import LogReader, read
from recorder.read.scan import Damage, FileSource
from replay.export.timeline import Timeline
from replay.story.inspect import inspect
from replay.view import parts as view_parts
from replay.view.document import PAGE_CSP, SCRIPTS, digest_of, page_of, view_command
from replay.view.parts import (
    PEAKS_A_SECOND,
    PIECE_S,
    SIDE_MAX,
    VOICE_S_MAX,
    Part,
    Pictures,
    Track,
    encode,
    peaks,
    plain,
    shrink,
)
from replay.view.story import Comparison, Finding
from tests.browser.view_pages import narrate, page_text, policy_of, read_page
from tests.generated.clients import tape
from tests.golden.logs import LOGS, SAMPLE
from tests.replay.test_cli import with_wrong_frame
from tests.replay.test_logs import HEAD, Scene, busy_scene, scenes, write_log

NODE: Final = shutil.which("node")
PAGE: Final = Path(view_parts.__file__).parent / "page"
GOLDEN: Final = {path.name.split(".")[0]: path for path in LOGS}
SAMPLED: Final = [path.name.split(".")[0] for path in SAMPLE]
NAMES: Final = ("v1-realtime-video", "v1-duplex-v1-audio", "v1-legacy-duplex", "v1-realtime-chat")


def golden(name: str) -> tuple[dict[str, list[Any]], Any]:
    """Tell a golden log, for its page and as `inspect` does."""
    with LogReader(GOLDEN[name]) as reader:
        items = list(reader)
        return narrate(reader.head.fields, items), inspect(reader.head.fields, items)


# -- for the console ------------------------------------------------------------------------------


def test_the_words_of_an_utterance_are_one_passage() -> None:
    """Each second of what the user says would be a line of its own."""
    with LogReader(GOLDEN["v1-realtime-user-words"]) as reader:
        digest = json.loads(b"".join(digest_of(reader.head.fields, reader)))
    assert [it["text"] for it in digest["said"] if it["voice"] == "user"] == ["hello there"]


def test_a_difference_is_said_once() -> None:
    """A reader of two recordings would look for it in a thousand records."""

    def told(*names: str) -> Any:
        one, other = (partial(FileSource, GOLDEN[name]) for name in names)
        return json.loads(b"".join(digest_of({}, (), pair=(one, other, "other"))))

    found = told("v1-live", "v1-realtime-user-words")
    assert (found["first"]["what"], found["first"]["index"]) == ("opening", None)
    assert found["differences"] > 1
    same = told("v1-live", "v1-live")
    assert (same["first"], same["differences"], same["same"]) == (None, 0, same["compared"])


# -- sound ----------------------------------------------------------------------------------------


def second(level: float = 0.5, *, rate_hz: int = INPUT_RATE_HZ, seconds: float = 1) -> bytes:
    return np.full(int(rate_hz * seconds), level, "<f4").tobytes()


def values(parts: list[Part]) -> list[Any]:
    return [part.value for part in parts]


def test_a_gap_begins_a_piece() -> None:
    """A page would hold minutes of silence."""
    track = Track("user")
    assert track.take(INPUT_RATE_HZ, second()) == []
    (piece,) = values(track.take(3 * INPUT_RATE_HZ, second()))
    assert (piece["begin_ns"], piece["end_ns"]) == (NS_PER_S, 2 * NS_PER_S)
    (piece,) = values(track.flush())
    assert (piece["begin_ns"], piece["end_ns"], piece["lead_s"]) == (3 * NS_PER_S, 4 * NS_PER_S, 0)
    assert track.flush() == []


def test_jitter_begins_no_piece() -> None:
    """A page of ten minutes would be cut into hundreds of pieces, or run ahead of the log."""
    track = Track("user")
    late = INPUT_RATE_HZ * 30 // 1000
    assert track.take(0, second()) + track.take(INPUT_RATE_HZ + late, second()) == []
    (piece,) = values(track.flush())
    assert (piece["begin_ns"], piece["end_ns"]) == (0, 2 * NS_PER_S + 30_000_000)


@pytest.mark.soak
def test_a_flood_is_heard_up_to_the_bound() -> None:
    """A client that sends hours of sound at once would make a page of hours."""
    track = Track("user")
    parts: list[Part] = []
    for number in range(VOICE_S_MAX // 10 + 6):
        parts += track.take(10 * number * INPUT_RATE_HZ, second(seconds=10))
    assert values(parts + track.flush())[-1]["end_ns"] == VOICE_S_MAX * NS_PER_S
    assert track.left_out_s == 60


def test_a_long_stretch_is_cut_into_pieces_that_overlap() -> None:
    """Seeking would decode minutes, or each piece would begin with a click."""
    track = Track("user")
    parts = []
    for number in range(2 * PIECE_S + 10):
        parts += track.take(number * INPUT_RATE_HZ, second(0.1))
    pieces = values(parts + track.flush())
    assert [round((piece["end_ns"] - piece["begin_ns"]) / NS_PER_S) for piece in pieces] == [
        *(PIECE_S, PIECE_S, 10)
    ]
    assert [piece["lead_s"] for piece in pieces] == [0, 0.08, 0.08]
    assert pieces[0]["end_ns"] == pieces[1]["begin_ns"]


def test_a_voice_has_a_bound() -> None:
    """A log that claims a day of sound would fill the memory."""
    track = Track("model")
    track._kept_samples = VOICE_S_MAX * OUTPUT_RATE_HZ - 10
    parts = track.take(0, second(rate_hz=OUTPUT_RATE_HZ))
    assert (parts, track.flush(), track.left_out_s) == ([], [], 1)


def decode(opus: bytes) -> np.ndarray[Any, Any]:
    """Decode, at the 48 kHz that Opus always gives."""
    with av.open(io.BytesIO(opus)) as container:
        return np.concatenate([frame.to_ndarray()[0] for frame in container.decode(audio=0)])


@pytest.mark.parametrize("voice", ["user", "model"])
def test_sound_comes_back(voice: Any) -> None:
    """Somebody would hear noise, or words beside the place where they are drawn."""
    samples = np.frombuffer(tape(3), "<f4")[: 5 * INPUT_RATE_HZ]
    rate_hz = INPUT_RATE_HZ if voice == "user" else OUTPUT_RATE_HZ
    again = decode(encode(samples, voice))
    step = 48_000 // rate_hz
    assert len(again) == len(samples) * step
    assert np.corrcoef(again[::step], samples)[0, 1] > 0.95
    assert encode(samples, voice) == encode(samples, voice)


def test_wild_samples_are_clipped() -> None:
    """A client's 3e38 would silence the encoder, or end it."""
    track = Track("user")
    wild = np.array([3e38, -3e38, np.nan, np.inf] * 4000, "<f4").tobytes()
    track.take(0, wild + b"\0\0")
    (piece,) = values(track.flush())
    assert set(np.frombuffer(pybase64.b64decode(piece["peaks"]), np.int8)) <= {-127, 0, 127}
    assert np.abs(decode(pybase64.b64decode(piece["file"]))).max() < 4


def test_peaks_are_the_lowest_and_the_highest() -> None:
    """A voice would be drawn with another's shape."""
    samples = np.array([0.5, -0.25, 0.1, 0.2, -1.0], np.float32)
    assert np.frombuffer(peaks(samples, 2), np.int8).tolist() == [-32, 64, 13, 25, -127, 0]


# -- pictures -------------------------------------------------------------------------------------


def jpeg(width: int, height: int, shade: int = 90) -> bytes:
    image = np.full((height, width, 3), shade, np.uint8)
    image[: height // 2] = 200
    made: bytes = simplejpeg.encode_jpeg(image)
    return made


@pytest.mark.parametrize(("width", "height"), [(640, 360), (300, 900), (1, 40), (40, 1), (17, 5)])
def test_pictures_are_made_small(width: int, height: int) -> None:
    """Five minutes of video would make a page of a hundred megabytes."""
    small = shrink(jpeg(width, height))
    assert small is not None
    tall, wide, *_ = simplejpeg.decode_jpeg_header(small)
    scale = min(1, SIDE_MAX / max(width, height))
    assert (wide, tall) == (max(1, round(width * scale)), max(1, round(height * scale)))


def test_a_picture_is_kept_once() -> None:
    """A camera that stands still would fill the page with one picture."""
    pictures = Pictures()
    first, other, again = (
        pictures.take(number, jpeg(64, 48, shade)).value
        for number, shade in enumerate((10, 250, 10))
    )
    assert isinstance(first, dict)
    assert isinstance(other, dict)
    assert "jpeg" in first
    assert "jpeg" in other
    assert again == {"at_ns": 2, "bytes": len(jpeg(64, 48, 10)), "same_as": 0}


def test_a_damaged_picture_is_told_without_it() -> None:
    """A frame that does not decode would end the page, or reach the browser's decoder."""
    pictures = Pictures()
    for number, data in enumerate((b"", jpeg(64, 48)[:200], b"<svg onload=alert(1)>")):
        assert pictures.take(number, data).value == {"at_ns": number, "bytes": len(data)}
    assert (pictures.count, pictures.left_out) == (3, 3)


# -- the story ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLED)
def test_tells_every_golden_log(name: str) -> None:
    """A session of some dialect, or a damaged one, could not be looked at."""
    told, inspected = golden(name)
    (story,) = told["story"]
    assert len(told["rows"]) == inspected.records
    assert [unit["index"] for unit in story["units"]] == [unit.index for unit in inspected.units]
    assert [turn["text"] for turn in story["turns"]] == [turn.text for turn in inspected.turns]
    assert len(story["drops"]) == len(inspected.drops)
    assert [error["code"] for error in story["errors"]] == [e.code for e in inspected.errors]
    assert story["end"]["reason"] == inspected.end.reason
    assert len(story["damages"]) == inspected.damage_count
    assert bool(story["findings"]) == (inspected.diverged_seq is not None)
    seqs = {row[0] for row in told["rows"]}
    points = (story["units"], story["drops"], story["errors"])
    assert {each["seq"] for kind in points for each in kind if each["seq"] is not None} <= seqs
    for piece in told["sound"]:
        assert 0 <= piece["begin_ns"] < piece["end_ns"]


def test_words_stand_where_they_are_heard() -> None:
    """Text would run ahead of the voice that speaks it."""
    told, _ = golden("v1-realtime-video")
    (story,) = told["story"]
    first, last = story["said"]
    spoken = [piece for piece in told["sound"] if piece["voice"] == "model"]
    assert (first[1], first[2] - first[1]) == (spoken[0]["begin_ns"], NS_PER_S)
    assert (last[1], last[2]) == (first[2], spoken[-1]["end_ns"])
    assert [text.strip() for _, _, _, text, _ in story["said"]] == ["unit 2", "unit 3"]


def test_units_know_what_they_waited_for() -> None:
    """The wait at the barrier, which makes a model seem slow, could not be seen."""
    told, _ = golden("v1-realtime-video")
    (story,) = told["story"]
    flooded = [unit for unit in story["units"] if unit["arrived_ns"] == 7_300_000_000]
    waits = [unit["started_ns"] - unit["arrived_ns"] for unit in flooded]
    assert waits == sorted(waits)
    assert (len(waits), waits[0], waits[-1] > 300_000_000) == (6, 0, True)
    assert max(count for _, count in story["waiting"]) == 5
    assert [drop["at_ns"] for drop in story["drops"]] == [7_300_000_000] * 2
    rows = {row[0]: row for row in told["rows"]}
    assert all(rows[unit["seq"]][3] == "StartUnit" for unit in story["units"])
    assert [unit["undone_ns"] for unit in story["units"] if unit["outcome"] == "failed"] == [
        4_069_999_999
    ]


def test_what_is_written_stands_where_it_is_heard() -> None:
    """The words of a file that was sent at once would all stand at its beginning, ahead of it."""
    told, _ = golden("v1-transcription-context-full")
    (story,) = told["story"]
    begins_ms = [begin_ns // 1_000_000 for _, begin_ns, _, _, _ in story["said"]]
    assert [round(begin_ms, -2) for begin_ms in begins_ms] == [
        *(1_000, 2_000, 3_000),
        *(5_000, 6_000, 7_000),
        *(9_000, 10_000, 11_000),
    ]


def test_an_interruption_stops_the_voice() -> None:
    """A page would play what no client has played."""
    scene = Scene()
    scene.activate()
    scene.unit(1)
    scene.send(busy_scene_append_forced())
    scene.answer(0)
    scene.answer()
    scene.finish()
    told = narrate(HEAD, scene.records)
    spoken = [piece for piece in told["sound"] if piece["voice"] == "model"]
    assert len(spoken) == 1
    assert spoken[0]["end_ns"] - spoken[0]["begin_ns"] == 10_000_000


def busy_scene_append_forced() -> str:
    """An append that forces the model to listen."""
    return json.dumps(
        {
            "type": "input.append",
            "input": {"audio": pybase64.b64encode_as_string(second()), "force_listen": True},
        }
    )


def test_tells_a_queue_and_a_pause() -> None:
    """One could not see what a client waited for."""
    waited, _ = golden("v1-duplex-v1-audio")
    assert [place for _, place, _ in waited["story"][0]["queue"]][-2:] == [1, 0]
    paused, _ = golden("v1-legacy-duplex")
    (begin, end), (again, never) = paused["story"][0]["pauses"]
    assert begin < end <= again
    assert never is None


def test_tells_a_chat() -> None:
    """A question's words and picture, or the answer to it, would be missing."""
    told, inspected = golden("v1-realtime-chat")
    (story,) = told["story"]
    asked = [text for voice, _, _, text, _ in story["said"] if voice == "user"]
    assert asked == ["hello", "what is it?", "one two three four five six"]
    answered = "".join(text for voice, _, _, text, _ in story["said"] if voice == "model")
    assert answered.startswith(inspected.turns[0].text)
    assert len(told["picture"]) == 1


def test_tells_the_pictures_of_items() -> None:
    """What a client of `openai` showed the model would be missing, or what was refused shown."""
    told, _ = golden("v1-openai-pictures")
    first, second, third, again = told["picture"]
    for shown, size in ((first, (48, 64)), (second, (48, 64)), (third, (47, 64))):
        made = simplejpeg.decode_jpeg(pybase64.b64decode(shown["jpeg"]))
        assert made.shape == (*size, 3)
    assert round(again["at_ns"] / NS_PER_S) == 1
    assert (again["bytes"], again["same_as"]) == (second["bytes"], 1)
    assert told["story"][0]["pictures_left_out"] == 0


def test_pieces_of_sound_are_resampled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user of OpenAI's APIs said would be distorted: a resampler keeps what went before."""
    pieces = list[bytes]()
    take = Resampler.take

    def taken(heard: Resampler, data: bytes) -> bytes:
        pieces.append(data)
        return take(heard, data)

    monkeypatch.setattr(Resampler, "take", taken)
    with LogReader(GOLDEN["v1-openai-pictures"]) as reader:
        items = list(reader)
        list(Timeline(reader.head.fields, items))
        heard_once, pieces[:] = list(pieces), []
        narrate(reader.head.fields, items)
    assert heard_once
    assert pieces == heard_once


@settings(max_examples=25)
@given(scenes())
def test_tells_any_session(scene: Scene) -> None:
    """Some odd session could not be looked at."""
    told = narrate(HEAD, scene.records)
    (story,) = told["story"]
    assert len(story["units"]) == scene.session.counts["units"]
    assert all(unit["arrived_ns"] <= unit["started_ns"] for unit in story["units"])
    assert story["findings"] == []
    assert json.dumps(told, allow_nan=False)


def test_tells_what_is_left_of_a_damaged_log() -> None:
    """A log with one bad block could not be looked at."""
    records = busy_scene().records
    lost = Damage(offset=9, length=1, reason="payload", detail="bad", first_seq=40, records=60)
    told = narrate(HEAD, [*records[:40], lost, *records[100:]], replayed=True)
    (story,) = told["story"]
    assert story["damages"] == [[40, 60, "payload", "bad"]]
    assert story["verdict"] == "damaged"
    assert len(told["rows"]) == len(records) - 60


def test_shows_where_a_replay_parts() -> None:
    """A divergence would be a number that one has to look for."""
    seq, records = with_wrong_frame(busy_scene().records)
    (story,) = narrate(HEAD, records, replayed=True)["story"]
    (finding,) = story["findings"]
    assert (finding["seq"], finding["at_ns"]) == (seq, records[seq].at_ns)
    assert story["verdict"] == "diverged"
    assert len(story["units"]) == 27


def test_shows_findings_of_others() -> None:
    """Where another session differs could not be seen beside the sound."""
    comparison = Comparison(name="x" * 9000, findings=[Finding(title="t", unit=3, detail=("d",))])
    (story,) = narrate(HEAD, busy_scene().records, comparison=comparison)["story"]
    assert story["compared"]["differences"] == 1
    assert story["findings"][0]["unit"] == 3


# -- what is told is bounded and harmless ---------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@settings(max_examples=2 * settings.default.max_examples)
@given(VALUES)
def test_any_value_is_json(value: Any) -> None:
    """A record that holds something odd would make a page that cannot be read."""
    text = json.dumps(plain(value), allow_nan=False)
    for number in re.findall(r"(?<![\w.\"])-?\d{17,}(?![\w.\"])", re.sub(r'"[^"]*"', "", text)):
        assert abs(int(number)) < 2**53


def test_large_values_are_cut() -> None:
    """One record could make the page as large as it likes."""
    deep: Any = []
    for _ in range(60):
        deep = [deep]
    wide = {str(number): "x" * 9000 for number in range(9000)}
    assert len(json.dumps(plain(deep))) < 100
    assert len(json.dumps(plain(wide))) < 64 * 5000
    assert plain(b"\0" * 7) == "(7 bytes)"
    assert plain([1] * 100) == [*([1] * 64), "… 36 more"]


HOSTILE: Final = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\u2028\u2029 \ud800 \udfff \x00",
    "]]>&lt;img src=x onerror=alert(1)>",
    "{{script}}{{name}}<!-- parts -->",
    "__proto__",
)


@pytest.fixture(scope="module")
def hostile_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log whose every text is an attack on the page."""
    scene = Scene()
    scene.activate()
    scene.unit(1)
    records = [*scene.records]
    for text in HOSTILE:
        key = text.encode("ascii", "ignore").decode()  # a log holds no surrogates in keys
        fields = {"text": text, key: [text], "__proto__": {"toString": text}}
        mark = Record(kind="mark", seq=len(records), at_ns=scene.now_ns, fields=fields)
        frame = json.dumps({"type": text, "error": {"code": text, "message": text}})
        rx = {"type": "FrameReceived", "frame": frame}
        records += [mark, attrs.evolve(mark, kind="rx", seq=mark.seq + 1, fields=rx)]
    fin = Record(kind="fin", seq=len(records), at_ns=scene.now_ns, fields={"reason": HOSTILE[5]})
    head = attrs.evolve(records[0], fields={**HEAD, "recording_id": HOSTILE[0]})
    folder = tmp_path_factory.mktemp("hostile")
    return write_log(folder, [head, *records[1:], fin])


def test_no_text_gets_out_of_its_block(hostile_log: Path) -> None:
    """Whoever talks to a server could run a script where its operator looks."""
    page = page_text(hostile_log.read_bytes())
    assert "<script>alert" not in page
    assert len(re.findall("<script", page)) == len(
        re.findall('<script (type="app|type="mod)', page)
    )
    told = read_page(page)
    marks = [row[4] for row in told["rows"] if row[2] == "mark"]
    assert [mark["text"] for mark in marks] == [*HOSTILE]
    assert page.isascii() or not any(text in page for text in ("\u2028", "\u2029"))


def test_the_page_allows_itself_and_nothing_else() -> None:
    """What slipped through could load or send something."""
    page = page_text(GOLDEN["v1-invalid-frame"].read_bytes())
    policy = policy_of(page)
    assert policy == {
        name: values for name, *values in (each.split() for each in PAGE_CSP.split("; "))
    }
    assert policy["default-src"] == ["'none'"]
    script = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, found in (("script-src", script), ("style-src", style)):
        assert found is not None
        digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
        assert policy[kind] == [f"'sha256-{digest}'"]
    assert "http:" not in page
    assert "https:" not in page


def test_the_page_comes_while_the_log_is_read() -> None:
    """A page of ten minutes would be held in memory, or a server would answer nothing for long."""
    with LogReader(GOLDEN["v1-realtime-many-units"]) as reader:
        left = [reader.tail_bytes for _ in page_of(reader.head.fields, reader)]
    assert len(set(left)) > 3
    assert left[-1] == 0


# -- the scripts ----------------------------------------------------------------------------------


def test_every_script_is_in_the_page_once() -> None:
    """A module would be forgotten, and the page empty."""
    assert sorted(SCRIPTS) == sorted(path.name for path in PAGE.glob("*.js"))
    for number, name in enumerate(SCRIPTS):
        needed = re.findall(r'from "\./(\w+\.js)"', (PAGE / name).read_text("utf-8"))
        assert set(needed) <= set(SCRIPTS[:number]), f"{name} needs what comes after it"


def test_both_ends_count_peaks_alike() -> None:
    """A voice would be drawn longer or shorter than it is heard."""
    text = (PAGE / "waveform.js").read_text("utf-8")
    assert f"PEAKS_A_SECOND = {PEAKS_A_SECOND};" in text


@pytest.mark.skipif(NODE is None, reason="there is no node to run JavaScript with")
def test_what_the_page_computes() -> None:
    """Times, zooming, the deadline of a unit or a shortened value would be wrong."""
    script = Path(__file__).parents[1] / "javascript" / "view.mjs"
    assert NODE is not None
    command = [NODE, "--no-warnings", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


# -- the command ----------------------------------------------------------------------------------


def call(*arguments: object) -> Result:
    """Run the command; whatever happens, it must not end in a traceback."""
    command: click.Command = view_command
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rec-000001.session.zst"
    path.write_bytes(GOLDEN["v1-realtime-video"].read_bytes())
    return path


def test_writes_a_page_beside_the_log(log: Path, tmp_path: Path) -> None:
    """The first thing that somebody tries would not work."""
    result = call(log)
    page = tmp_path / "rec-000001.html"
    assert (result.exit_code, result.stdout.split(": ")[0]) == (0, str(page))
    assert page.read_text("utf-8") == page_text(log.read_bytes())
    assert sorted(path.name for path in tmp_path.iterdir()) == [page.name, log.name]


def test_writes_a_page_to_stdout(log: Path) -> None:
    """A page could not be piped, or would be mixed with words."""
    assert call(log, "-o", "-").stdout_bytes.decode() == page_text(log.read_bytes())
    assert call(log, "-o", "-", "--open").exit_code == 2


def test_tells_what_replay_and_diff_find(log: Path, tmp_path: Path) -> None:
    """The options would be taken, and show nothing."""
    other = GOLDEN["v1-realtime-interrupts"]
    assert call(log, "--replay", "--diff", other, "-o", tmp_path / "a.html").exit_code == 0
    (story,) = read_page((tmp_path / "a.html").read_text("utf-8"))["story"]
    assert story["verdict"] == "identical"
    assert story["compared"]["name"] == "v1-realtime-interrupts"
    assert story["compared"]["differences"] == len(story["findings"]) > 0
    assert call(log, "--diff", log, "-o", tmp_path / "b.html").exit_code == 0
    (story,) = read_page((tmp_path / "b.html").read_text("utf-8"))["story"]
    assert story["compared"]["differences"] == 0


def test_says_in_a_line_what_is_wrong(log: Path, tmp_path: Path) -> None:
    """A traceback would be all that somebody sees, or half a page would be left behind."""
    nowhere = tmp_path / "none" / "a.html"
    junk = tmp_path / "junk.session.zst"
    junk.write_bytes(b"no log" * 100)
    for arguments, name in (
        ((tmp_path / "missing",), "missing"),
        ((junk,), "junk"),
        ((log, "-o", nowhere), str(nowhere)),
        ((log, "--diff", junk), "junk"),
    ):
        result = call(*arguments)
        assert result.exit_code == 2
        assert name in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.glob("*.html"))
    assert not list(tmp_path.glob(".*"))


def test_never_writes_over_a_log(log: Path) -> None:
    """A slip of the fingers would cost a recording."""
    before = log.read_bytes()
    assert call(log, "-o", log).exit_code == 2
    assert log.read_bytes() == before
    assert len(list(read(log))) > 100
