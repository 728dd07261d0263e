"""Redacted logs: nothing of what was taken out is left, and the session is the same."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

import attrs
import numpy as np
import pybase64
import pytest
import simplejpeg
import zstandard
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.events import Endpoint
from protocol.values.frames import Utf8Text
from protocol.values.limits import Mode
from protocol.values.model import (
    Finalized,
    Opened,
    Prefill,
    Silent,
    Span,
    TurnChunk,
    TurnResult,
    UnitResult,
)
from protocol.values.records import RECORD_FIELDS, digest
from recorder.format.format import Record
from recorder.read.reader import read
from recorder.repair import verify
from replay.redact.content import KINDS, Policy, Tally
from replay.redact.frames import FrameEditor
from replay.redact.redaction import (
    FIELDS,
    EventEditor,
    RedactError,
    Redaction,
    Special,
    redact_command,
)
from replay.rerun.logic import replay
from runtime.media.image import decode_jpeg
from tests.golden.logs import FOLDER
from tests.replay.test_logs import OPENED
from tests.replay.test_remake import GOLDEN, events_of
from tests.sessions.answering import Answers, play, write_events
from tests.sessions.in_memory import append_frame, base64, close_frame, init_frame, pcm
from tests.strategies.messages import wav


def redact(log: Path, output: Path, *options: object) -> Result:
    """Run the command; whatever happens, it must not end in a traceback."""
    arguments = [str(each) for each in (log, "--output", output, *options)]
    result = CliRunner().invoke(redact_command, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def frames_of(records: list[Record]) -> list[Any]:
    """Return the frames of the client."""
    return [record.fields["frame"] for record in records if record.kind == "rx"]


# -- markers: something unique in every place, and every trace that it could leave -----------------


class Markers:
    """Unique things to say and show, and what each of them looks like wherever it may stand."""

    def __init__(self, seed: int) -> None:
        self.needles: dict[str, list[bytes]] = {}
        self._random = random.Random(seed)

    def word(self, name: str, *, odd: str = "") -> str:
        """Make a text; `odd` characters stand within it."""
        letters = "".join(self._random.choices("bcdfghjklmnp", k=14))
        text = letters[:7] + odd + letters[7:]
        self.needles[name] = [*_traces(text.encode()), *_traces(text.encode("utf-16-le"))]
        self.needles[name] += [digest(text).encode(), json.dumps(text).strip('"').encode()]
        return text

    def ids(self, name: str) -> tuple[int, ...]:
        """Make token ids."""
        made = tuple(self._random.sample(range(10**8, 10**9), 3))
        self.needles[name] = [str(one).encode() for one in made] + [digest(made).encode()]
        return made

    def sound(self, name: str, samples: int = 16_000) -> bytes:
        """Make float32 LE samples."""
        data = np.random.default_rng(self._random.getrandbits(32)).uniform(-1, 1, samples)
        return self._file(name, data.astype("<f4").tobytes())

    def jpeg(self, name: str) -> bytes:
        """Make a picture."""
        rng = np.random.default_rng(self._random.getrandbits(32))
        pixels = rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)
        return self._file(name, bytes(simplejpeg.encode_jpeg(pixels)))

    def hash(self, name: str) -> str:
        """Make a hash."""
        made = f"{self._random.getrandbits(128):032x}"
        self.needles[name] = [made.encode()]
        return made

    def file(self, name: str, data: bytes) -> bytes:
        """Take a file that was made elsewhere."""
        return self._file(name, data)

    def _file(self, name: str, data: bytes) -> bytes:
        middle = len(data) // 2 // 4 * 4
        pieces = _traces(data[middle : middle + 24])
        self.needles[name] = [*pieces, *_hashes(data), digest(data).encode()]
        return data


def _hashes(data: bytes) -> list[bytes]:
    made = [hashlib.new(name, data) for name in ("sha256", "sha1", "md5", "blake2b")]
    made.append(hashlib.blake2b(data, digest_size=16))
    return [trace for one in made for trace in (one.digest(), one.hexdigest().encode())]


def _traces(data: bytes) -> list[bytes]:
    """Return bytes as they are, in base64 wherever they begin, in hex, and their hashes."""
    found = [data, data.hex().encode(), *_hashes(data)]
    for shift in range(3):
        text = pybase64.b64encode(bytes(shift) + data)
        found.append(text[4 if shift else 0 : -4])  # without what neighbours have a part in
    return found


def haystack(log: Path) -> bytes:
    """Return all that a log holds: what its frames decompress to, and what a reader makes of it."""
    data = log.read_bytes()
    opened = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True)
    said = [piece for record in read(log) for piece in _pieces(record.fields)]
    return b"\n".join([data, opened.read(), *said])


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from (key.encode("utf-8", "surrogatepass"), *_pieces(below))
    elif isinstance(value, list | tuple):
        for below in value:
            yield from _pieces(below)
    else:
        is_text = isinstance(value, str)
        yield (
            value.encode("utf-8", "surrogatepass")
            if is_text
            else (value if isinstance(value, bytes) else str(value).encode())
        )


def found_in(marks: Markers, log: Path) -> set[str]:
    """Name the markers of which there is a trace."""
    hay = haystack(log)
    return {name for name, needles in marks.needles.items() if any(one in hay for one in needles)}


class MarkedAnswers(Answers):
    """A model that says markers alone."""

    def __init__(self, marks: Markers) -> None:
        self._marks = marks

    def opened(self) -> Opened:
        """Say what a model holds after a prompt."""
        return Opened(prompt_length=3, fed_ids=self._marks.ids("prompt ids"))

    def unit(self, index: int) -> UnitResult:
        """Say what a model makes of a unit."""
        marks = self._marks
        return UnitResult(
            index=index,
            is_listen=False,
            text=marks.word(f"said {index}", odd="\u00fc\n\U0001f600"),
            pcm=marks.sound(f"speech {index}", 2400),
            kv_length=9,
            decided_ids=marks.ids(f"decided {index}"),
            fed_ids=marks.ids(f"fed {index}"),
            codec_ids=marks.ids(f"codes {index}"),
            input_hash=marks.hash(f"input hash {index}"),
            logits_hash=marks.hash(f"logits hash {index}"),
            margin=0.123456789,
        )

    def finalized(self, index: int) -> Finalized:
        """Say what a finalized unit is."""
        return Finalized(index=index, kv_length=9, fed_ids=self._marks.ids(f"finalized {index}"))

    def prefill(self, index: int) -> Prefill:
        """Say what a model holds of a conversation."""
        return Prefill(
            index=index,
            input_tokens=3,
            fed_ids=self._marks.ids(f"prefilled {index}"),
            input_hash=self._marks.hash(f"conversation hash {index}"),
        )

    def chunks(self, index: int) -> tuple[TurnChunk, ...]:
        """Say an answer in pieces."""
        marks = self._marks
        return tuple(
            TurnChunk(
                index=index,
                step=step,
                text=marks.word(f"piece {index} {step}"),
                pcm=marks.sound(f"piece's speech {index} {step}", 2400),
                token_ids=marks.ids(f"tokens {index} {step}"),
                codec_ids=marks.ids(f"turn's codes {index} {step}"),
            )
            for step in range(2)
        )

    def turn(self, index: int) -> TurnResult:
        """Say how an answer ends."""
        marks = self._marks
        return TurnResult(
            index=index,
            text=marks.word(f"answer {index}"),
            pcm=marks.sound(f"last speech {index}", 2400),
            codec_ids=marks.ids(f"last codes {index}"),
            logits_hash=marks.hash(f"turn's logits {index}"),
        )

    def media(self, effect: ef.DecodeMedia) -> dict[str, Any]:
        """Say what was decoded."""
        marks, number = self._marks, effect.media
        if effect.kind == "jpeg":
            return {}
        pictures = (marks.jpeg(f"decoded {number}"),) if effect.kind in {"image", "video"} else ()
        stacked = (marks.jpeg(f"stacked {number}"),) if effect.kind == "video" else ()
        sound = b"" if effect.kind == "image" else marks.sound(f"heard {number}")
        return {"pcm": sound, "pictures": pictures, "stacked": stacked}


def _voice(marks: Markers, name: str) -> str:
    """Make a WAV of which its tags, its samples and what comes behind them are marked."""
    samples = np.frombuffer(marks.sound(f"{name}, as float"), "<f4")
    del marks.needles[f"{name}, as float"]
    body = (samples * 32767).astype("<i2").tobytes()
    tag = marks.word(f"{name}'s tag").encode()
    plain = wav(len(samples))
    head, data = plain[12:36], b"data" + len(body).to_bytes(4, "little") + body
    chunks = head + b"LIST" + len(tag).to_bytes(4, "little") + tag + data
    marks.file(name, body)
    return base64(b"RIFF" + (4 + len(chunks)).to_bytes(4, "little") + b"WAVE" + chunks)


def duplex_frames(marks: Markers) -> Iterator[str | bytes]:
    """Say and show something in every place of `realtime`, right and wrong."""
    word = marks.word
    yield json.dumps({"type": word("unknown type"), word("unknown key"): word("unknown value")})
    yield json.dumps(
        {
            "type": "session.init",
            "payload": {
                "system_prompt": word("prompt", odd='\u4f60\\"\n'),
                "voice": {"ref_audio_base64": _voice(marks, "voice")},
                "config": {"force_listen_count": 0},
                word("ignored key"): {"deep": [word("ignored value"), 123456]},
            },
        },
        ensure_ascii=False,
    )
    for number in range(2):
        yield json.dumps(
            {
                "type": "input.append",
                "input_id": word(f"input id {number}"),
                "input": {
                    "audio": base64(marks.sound(f"sound {number}")),
                    "video_frames": [base64(marks.jpeg(f"frame {number}"))],
                },
            }
        )
    yield json.dumps({"type": "input.append", "input": {"audio": word("no base64", odd="!")}})
    yield json.dumps({"type": "input.append", "input": {"audio": base64(pcm()), "max_slice_nums":
                                                        word("wrong kind")}})  # fmt: skip
    yield json.dumps({"type": "session.close", "reason": word("reason")})


def legacy_duplex_frames(marks: Markers) -> Iterator[str | bytes]:
    """Likewise, of what `legacy-duplex` has beside that; its end is a frame that is none."""
    word = marks.word
    yield json.dumps(
        {
            "type": "prepare",
            "prefix_system_prompt": word("prompt"),
            "ref_audio_path": word("voice's name"),
            "tts_ref_audio_base64": _voice(marks, "spoken voice"),
        }
    )
    yield json.dumps({"type": "video_frame", "frame": base64(marks.jpeg("frame"))})
    yield json.dumps({"type": "audio_chunk", "audio_base64": base64(marks.sound("sound"))})
    yield json.dumps(
        {
            "type": "client_diagnostic",
            "metrics": {word("metric"): 12.5, "text": word("metric said")},
        }
    )
    yield word("no JSON", odd=" ")


def chat_frames(marks: Markers) -> Iterator[str | bytes]:
    """Likewise, of a chat that says again what was said."""
    word = marks.word
    yield '{"type": "session.init", "payload": {}}'
    parts = [
        {"type": "text", "text": word("question", odd="\u00e9\t")},
        {"type": "image", "data": base64(marks.jpeg("picture"))},
        {"type": "audio", "data": base64(marks.sound("question's sound"))},
        {"type": "video", "data": base64(b"\0\0\0\x08ftyp" + marks.sound("video", 200))},
    ]
    messages = [
        {"role": "system", "content": word("system prompt")},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": word("what was answered")},
        {"role": "user", "content": word("second question")},
    ]
    tts = {"ref_audio_data": _voice(marks, "voice")}
    asked = {"messages": messages, "tts": tts}
    yield json.dumps({"type": "input.append", "input_id": word("id"), "input": asked})
    wrong = {"messages": messages[3:], "generation": {word("unknown setting"): 1}}
    yield json.dumps({"type": "input.append", "input": wrong})
    key = word("key twice")
    yield f'{{"{key}": 1, "{key}": "{word("value twice")}"}}'


SCENES: Final[dict[str, tuple[Any, Mode, Endpoint]]] = {
    "realtime": (duplex_frames, "video", "realtime"),
    "legacy-duplex": (legacy_duplex_frames, "video", "duplex"),
    "chat": (chat_frames, "chat", "realtime"),
}


def marked_log(folder: Path, scene: str, seed: int) -> tuple[Path, Markers]:
    """Record a scene full of markers."""
    frames, mode, endpoint = SCENES[scene]
    marks = Markers(seed)
    label = marks.word("label") if endpoint == "duplex" else ""
    opened = attrs.evolve(OPENED, mode=mode, endpoint=endpoint, label=label)
    events = play(frames(marks), MarkedAnswers(marks), opened)
    config: dict[str, Any] = {"model": "/models/" + marks.word("model")}
    config |= {"owner": marks.word("owner"), "fork": {"blake2b": marks.hash("fork's hash")}}
    log = write_events(folder, events, config=config, note=marks.word("unknown head"))
    return log, marks


@pytest.mark.parametrize("scene", SCENES)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_nothing_is_left(scene: str, seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Somebody's voice, face or words would be in a log that was given away as free of them."""
    folder = tmp_path_factory.mktemp("marked")
    log, marks = marked_log(folder, scene, seed)
    assert found_in(marks, log) == marks.needles.keys()
    redacted = folder / "redacted.session.zst"
    result = redact(log, redacted)
    assert result.exit_code == 0, result.output
    assert found_in(marks, redacted) == set()
    assert replay(read(redacted)).identical
    assert verify(redacted).state == "finished"


def kinds_of(records: list[Record]) -> list[str]:
    """Return the kinds of records, but for states, which are written as they are today."""
    return [record.kind for record in records if record.kind != "state"]


@pytest.mark.slow
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name.split(".")[0])
def test_lengths_are_kept_and_the_session_is_the_same(path: Path, tmp_path: Path) -> None:
    """A redacted log would not replay, or say of another session than the one that was."""
    redacted = tmp_path / path.name
    result = redact(path, redacted)
    assert result.exit_code == 0, result.output
    before, after = list(read(path)), list(read(redacted))
    assert replay(after).identical
    assert kinds_of(after) == kinds_of(before)
    for old, new in zip(frames_of(before), frames_of(after), strict=True):
        assert type(old) is type(new)
        if isinstance(old, str):
            assert len(new) == len(old)
            assert len(new.encode()) == len(old.encode())
    for was, is_now in zip(events_of(before), events_of(after), strict=True):
        if isinstance(was, ev.UnitDone) and isinstance(is_now, ev.UnitDone):
            assert len(is_now.result.pcm) == len(was.result.pcm)
            assert not any(is_now.result.pcm)
            assert len(is_now.result.decided_ids) == len(was.result.decided_ids)


# -- the tables -----------------------------------------------------------------------------------


def classes_in_events() -> set[type]:
    """Find the attrs classes that events are made of."""
    found: set[type] = set()
    todo: list[type] = list(get_args(ev.Event))
    while todo:
        cls = todo.pop()
        if cls in found:
            continue
        found.add(cls)
        for field in attrs.fields(attrs.resolve_types(cls)):
            kinds = (field.type, *get_args(field.type))
            todo += [kind for kind in kinds if isinstance(kind, type) and attrs.has(kind)]
    return found - {Utf8Text}  # a frame: `FrameEditor` takes those


def test_every_field_of_every_event_is_classified() -> None:
    """A field that is added to an event would carry what was said into redacted logs."""
    known = {cls: {name for _, name in RECORD_FIELDS[cls]} for cls in classes_in_events()}
    assert {cls: set(fields) for cls, fields in FIELDS.items()} == known
    for cls, fields in FIELDS.items():
        below = {name for name, rule in fields.items() if rule is Special.BELOW}
        nested = {
            name
            for field, name in RECORD_FIELDS[cls]
            for kind in (field.type, *get_args(field.type))
            if isinstance(kind, type) and kind in FIELDS
        }
        assert below == nested, cls


def test_a_field_that_is_not_classified_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody has thought of would go through as it is."""
    log = write_events(tmp_path, play([init_frame()]))
    monkeypatch.delitem(FIELDS[ev.SlotLeased], "slot")  # type: ignore[arg-type]
    result = redact(log, tmp_path / "out.session.zst")
    assert (result.exit_code, "'slot'" in result.stderr) == (2, True)
    assert list(tmp_path.iterdir()) == [log]


# -- what is asked for ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "gone", "left"),
    [
        (["--side", "model"], {"said 0", "speech 0", "codes 1"}, {"sound 0", "prompt", "owner"}),
        (["--side", "user"], {"sound 0", "prompt", "prompt ids", "frame 1"}, {"said 0", "fed 1"}),
        (["--kind", "audio"], {"sound 1", "speech 1", "codes 0"}, {"said 1", "frame 0", "prompt"}),
        (["--kind", "video"], {"frame 0", "frame 1"}, {"sound 0", "said 0", "voice"}),
        (["--kind", "voice"], {"voice", "heard 0", "voice's tag"}, {"sound 0", "prompt"}),
        (["--kind", "prompt"], {"prompt", "prompt ids"}, {"reason", "said 0", "input id 0"}),
        (["--kind", "name"], {"input id 0", "owner", "model"}, {"reason", "said 0"}),
        (["--from", "3", "--to", "4"], {"sound 0", "said 0", "input id 1"}, {"sound 1", "said 1"}),
        (["--from", "4"], {"sound 1", "said 1", "reason"}, {"sound 0", "said 0", "prompt"}),
    ],
)
def test_only_what_is_asked_for(
    options: list[str], gone: set[str], left: set[str], tmp_path: Path
) -> None:
    """What was to stay would be gone, or what was to go would stay; and hashes would tell of it."""
    log, marks = marked_log(tmp_path, "realtime", 5)
    redacted = tmp_path / "redacted.session.zst"
    assert redact(log, redacted, *options).exit_code == 0
    found = found_in(marks, redacted)
    assert gone | found == found ^ gone  # disjoint
    assert left <= found
    assert not {name for name in found if "hash" in name}
    assert replay(read(redacted)).identical


def test_a_chat_s_sides_are_told_apart(tmp_path: Path) -> None:
    """The model's answers would stay in the questions that say them again."""
    log, marks = marked_log(tmp_path, "chat", 6)
    models, users = tmp_path / "m.session.zst", tmp_path / "u.session.zst"
    assert redact(log, models, "--side", "model").exit_code == 0
    assert redact(log, users, "--side", "user").exit_code == 0
    without_model, without_user = found_in(marks, models), found_in(marks, users)
    assert {"question", "system prompt", "picture"} <= without_model - without_user
    assert {"what was answered", "answer 0", "piece 0 1"} <= without_user - without_model
    assert "prefilled 0" not in without_model | without_user


def test_what_is_left_alone_is_left_byte_for_byte(tmp_path: Path) -> None:
    """Whoever looks for a fault in a client's frames would see ours."""
    odd = '{ "type":"input.append" ,"input_id":"\\u0061b", "input":{"audio":"PCM"}}'
    odd = odd.replace("PCM", base64(pcm()))
    log = write_events(tmp_path, play([init_frame(), odd, close_frame("enough")]))
    redacted = tmp_path / "redacted.session.zst"
    assert redact(log, redacted, "--kind", "audio").exit_code == 0
    frames = frames_of(list(read(redacted)))
    assert frames == [init_frame(), odd.replace(base64(pcm()), base64(bytes(64_000))), frames[2]]
    assert frames[2] == close_frame("enough")


def test_grey_pictures_can_be_looked_at(tmp_path: Path) -> None:
    """A page that shows a redacted log would show broken pictures."""
    marks = Markers(1)
    picture = marks.jpeg("frame")
    log = write_events(tmp_path, play([init_frame(), append_frame(video_frames=[base64(picture)])]))
    redacted = tmp_path / "redacted.session.zst"
    assert redact(log, redacted).exit_code == 0
    body = json.loads(frames_of(list(read(redacted)))[1])
    shown = pybase64.b64decode(body["input"]["video_frames"][0])
    assert len(shown) == len(picture)
    decode_jpeg(shown)
    pixels = simplejpeg.decode_jpeg(shown)
    assert pixels.shape == (48, 64, 3)
    assert pixels.std() == 0


# -- the command ----------------------------------------------------------------------------------


def test_it_says_what_it_took_out(tmp_path: Path) -> None:
    """Nobody could tell a redacted log from one in which nothing was said."""
    log = write_events(tmp_path, play([init_frame(), append_frame(), close_frame("enough")]))
    dry = CliRunner().invoke(redact_command, [str(log), "--dry-run", "--json"])
    assert [path.name for path in tmp_path.iterdir()] == [log.name]
    redacted = tmp_path / "redacted.session.zst"
    body = json.loads(redact(log, redacted, "--json").stdout)
    assert body.keys() == {
        *("log", "output", "side", "kinds", "from_s", "to_s", "removed", "records"),
        *("records_left_out", "pictures_without_content"),
    }
    assert json.loads(dry.stdout)["removed"] == body["removed"]
    removed = {(row["kind"], row["side"]): row["bytes"] for row in body["removed"]}
    assert removed["audio", "user"] == 64_000
    assert removed["text", "user"] == len("enough")
    head = next(iter(read(redacted))).fields
    assert [entry["removed"] for entry in head["redacted"]] == [body["removed"]]  # type: ignore[index,union-attr]
    again = tmp_path / "again.session.zst"
    assert "nothing to remove" in redact(redacted, again).stdout
    assert len(next(iter(read(again))).fields["redacted"]) == 2  # type: ignore[arg-type]
    assert set(body["kinds"]) == set(KINDS)


def test_what_cannot_be_redacted_is_one_line(tmp_path: Path) -> None:
    """Half a log would be taken for a redacted one, or a log be overwritten by one."""
    log = write_events(tmp_path, play([init_frame(), append_frame()]))
    output = tmp_path / "out.session.zst"
    broken = tmp_path / "broken.session.zst"
    data = bytearray(log.read_bytes())
    data[-200] ^= 1
    broken.write_bytes(data)
    chat, _ = marked_log(tmp_path_of(tmp_path, "chat"), "chat", 3)
    for path, options, words in (
        (tmp_path / "none", (), "there is no recording none"),
        (broken, (), "damaged"),
        (chat, ("--to", "3"), "a chat says again"),
    ):
        result = redact(path, output, *options)
        assert (result.exit_code, words in result.stderr) == (2, True), result.stderr
        assert result.stderr.count("\n") == 1
    assert not output.exists()
    output.write_text("mine")
    result = redact(log, output)
    assert (result.exit_code, output.read_text()) == (2, "mine")
    assert CliRunner().invoke(redact_command, [str(log)]).exit_code == 2


def tmp_path_of(tmp_path: Path, name: str) -> Path:
    """Make a folder."""
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_a_fault_of_a_call_has_no_words_of_the_call() -> None:
    """It quotes what the model wrote, and the schema of the tool."""
    fault = "there is no tool 'Dr Smith'"
    span = Span(kind="call", text="<function name='Dr Smith'/>", fault=fault)
    silent = Silent(end="eos", spans=(span,))
    finalized = Finalized(index=0, kv_length=1, silent=silent)
    editor = EventEditor(frames=FrameEditor(policy=Policy(), tally=Tally()))
    edited = editor.edit(ev.FinalizeDone(at_ns=0, finalized=finalized))
    assert "Smith" not in repr(edited)


def test_another_course_is_noticed() -> None:
    """A log of another version would be redacted into one that says what never happened."""
    path = FOLDER / "v1-realtime-video.session.zst"
    records = list(read(path))
    at = next(i for i, r in enumerate(records) if r.fields.get("type") == "StartUnit")
    unit = {**records[at].fields["unit"], "force_listen": True}  # type: ignore[dict-item]
    records[at] = attrs.evolve(records[at], fields={**records[at].fields, "unit": unit})
    run = Redaction(Policy())
    with pytest.raises(RedactError, match=f"would change: record {records[at].seq} is"):
        list(run.records(records))


@pytest.mark.parametrize("frame", ["", "1" * 5000, "[" * 100_000], ids=["empty", "long", "deep"])
def test_a_sent_frame_that_is_not_json_is_noticed(frame: str) -> None:
    """Whoever redacts what another sent in sees a traceback."""
    path = FOLDER / "v1-realtime-video.session.zst"
    records = list(read(path))
    at = next(i for i, r in enumerate(records) if r.kind == "tx")
    records[at] = attrs.evolve(records[at], fields={**records[at].fields, "frame": frame})
    with pytest.raises(RedactError, match=f"record {records[at].seq}: its frame is not JSON"):
        list(Redaction(Policy()).records(records))
