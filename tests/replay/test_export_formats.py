"""The formats of `antiphon export`: other tools read them, and find what was heard and shown."""

from __future__ import annotations

import io
import json
import re
import tarfile
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import av
import jsonschema
import numpy as np
import pybase64
import pytest
import simplejpeg
import soundfile
from click.testing import CliRunner
from mcap.reader import NonSeekingReader, make_reader

from recorder.read.reader import LogReader
from replay.export import formats
from replay.export.formats import captions, export_command, write_mcap
from replay.export.timeline import Timeline, Words
from replay.redact.redaction import redact_command
from replay.story.reading import SessionStory
from runtime.measures.talk import Sound
from tests.golden.logs import SAMPLE
from tests.replay.exported import (
    AUDIO,
    CHAT,
    GOLDEN,
    MS,
    PAUSED,
    SECOND,
    VIDEO,
    Talk,
    exported,
    impulses,
    jpeg,
    told,
)
from tests.replay.test_logs import RECORDING_ID, write_log

# -- captions and lines ---------------------------------------------------------------------------


def test_captions_stand_with_the_sound_that_says_them() -> None:
    """Words would be shown when they were sent, and not when they are heard."""
    assert exported(VIDEO, "srt").decode() == (
        "1\n00:00:03,550 --> 00:00:04,550\nModel: unit 2\n\n"
        "2\n00:00:04,550 --> 00:00:04,925\nModel: unit 3\n\n"
    )


def test_captions_of_a_transcription_stand_with_the_sound_that_they_are_of() -> None:
    """Those of a file that was sent at once would all be shown at its beginning, ahead of it."""
    srt = exported(GOLDEN / "v1-transcription.session.zst", "srt").decode()
    begins = [line.split()[0] for line in srt.splitlines() if "-->" in line]
    assert begins == ["00:00:01,000", "00:00:03,000", "00:00:11,000"]
    log = GOLDEN / "v1-transcription-context-full.session.zst"
    words = [moment for moment in told(log) if isinstance(moment, Words)]
    assert [round(it.begin_ns / MS) for it in words] == [
        *(1_000, 2_000, 3_000),
        *(5_000, 6_000, 7_000),
        *(9_000, 10_000, 11_000),
    ]


def test_captions_tell_nothing_ahead() -> None:
    """What is said after a pause would be read before it."""

    def words(at_s: int, text: str) -> Words:
        at_ns = at_s * 1_000 * MS
        return Words(voice="model", at_ns=at_ns, begin_ns=at_ns, end_ns=None, text=text)

    shown = captions([words(1, "good"), words(2, " morning"), words(9, " good night")])
    assert [(it.begin_ns // MS, it.text) for it in shown] == [
        (1_000, "good morning"),
        (9_000, "good night"),
    ]


def test_captions_of_a_chat_without_sound_can_be_read() -> None:
    """A word a caption would flicker by."""
    text = exported(CHAT, "vtt").decode()
    assert text.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.000\n<v User>hello\n")
    assert "<v Model>turn 0: hello (0 pictures, 0 sounds)\n" in text


def test_text_of_a_log_is_text_in_captions(tmp_path: Path) -> None:
    """A model could style, end or split a caption."""
    talk = Talk()
    talk.activate()
    talk.say(impulses(SECOND))
    talk.reply(0, impulses(240), 'a <b>&\n\n7\n00:00:00,000 --> 1 \x1b[31m"é"', ends=True)
    talk.at(2_000 * MS)
    talk.finish()
    log = write_log(tmp_path, talk.records)
    srt, vtt = (exported(log, to).decode() for to in ("srt", "vtt"))
    assert srt.count("-->") == vtt.count("-->") == 1
    assert srt.count("\n\n") == 1
    assert '<v Model>a &lt;b&gt;&amp; 7 00:00:00,000 --&gt; 1 [31m"é"\n' in vtt
    assert "\x1b" not in srt + vtt


def test_the_lines_say_what_they_promise() -> None:
    """A script would have to read the source for what a line holds."""
    documented = formats.__doc__ or ""
    for log in SAMPLE:
        lines = [json.loads(line) for line in exported(log, "jsonl").splitlines()]
        assert (lines[0]["kind"], lines[-1]["kind"]) == ("session", "end")
        for line in lines:
            keys = {"sound", "words", "picture", "session", "end"} & {line["kind"]}
            for name in line.keys() - {"kind", "at_ms"}:
                assert f"`{name}`" in documented, (keys, name)
        # A transcript comes later than its sound, and what followed was written before.
        times = [line["at_ms"] for line in lines[1:-1] if not line.get("transcribed")]
        assert times == sorted(times)


@pytest.mark.parametrize("name", ["duplex-tools", "chat-tools"])
def test_a_chat_holds_calls_and_their_results(name: str) -> None:
    """A trainer would refuse the line: a result without its call, or a call without a result."""
    body = json.loads(exported(GOLDEN / f"v1-{name}.session.zst", "chat"))
    assert [tool["function"]["name"] for tool in body["tools"]] == ["clock", "lamp"]
    assert body["tools"][0]["function"]["parameters"]["type"] == "object"
    pairs = []
    for one, other in pairwise(body["messages"]):
        if "tool_calls" in one:
            (call,) = one["tool_calls"]
            assert (other["role"], other["tool_call_id"]) == ("tool", call["id"])
            pairs.append((call["function"]["name"], other["content"]))
    assert sum(message["role"] == "tool" for message in body["messages"]) == len(pairs)
    answered = {"duplex-tools": ["ten", "half past nine"], "chat-tools": ["10:30", "10:31"]}[name]
    assert [content for _, content in pairs][:2] == answered
    assert {"error: no answer in time", formats.NO_RESULT} & {content for _, content in pairs}


def test_a_chat_joins_the_words_of_a_turn() -> None:
    """Each second of an answer would be a message of its own."""
    body = json.loads(exported(VIDEO, "chat"))
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "assistant"]
    assert body["messages"][1]["content"] == "unit 2 unit 3 "


def test_the_wire_of_a_log_is_named_in_its_lines() -> None:
    """One could not tell whose session the lines are of."""
    head = json.loads(exported(VIDEO, "jsonl").splitlines()[0])
    assert re.fullmatch(r"rec-\d+", head["recording_id"])
    assert head == {
        "kind": "session",
        "recording_id": RECORDING_ID,
        "model": "scripted",
        "mode": "video",
        "wall_ms": 1_700_000_000_001,
    }


# -- MP4 ------------------------------------------------------------------------------------------


def shown_session(tmp_path: Path) -> Path:
    """Grey pictures of several shapes from 500 ms on, and impulses of both voices."""
    talk = Talk()
    talk.activate()
    talk.at(500 * MS)
    talk.say(impulses(SECOND, 8_000), jpeg(80, 96, 64))
    talk.at(700 * MS)
    talk.reply(0, impulses(24_000, 12_000), "x", ends=True)
    talk.at(1_500 * MS)
    talk.say(impulses(SECOND), jpeg(200, 32, 64))
    talk.reply(1)
    talk.at(4_000 * MS)
    talk.finish()
    return write_log(tmp_path, talk.records)


def test_an_mp4_has_both_tracks_and_the_session_s_time(tmp_path: Path) -> None:
    """A player would show no picture, hear one voice, or end too early."""
    data = exported(shown_session(tmp_path), "mp4")
    with av.open(io.BytesIO(data)) as container:
        assert container.duration == 4_000_000
        kinds = {stream.type: stream for stream in container.streams}
        assert set(kinds) == {"audio", "video"}
        for stream in kinds.values():
            assert stream.duration is not None
            assert stream.duration * (stream.time_base or Fraction(0)) == 4
        frames = [
            (float(frame.time or 0), int(frame.to_ndarray(format="gray")[32, 48]))
            for frame in container.decode(video=0)
        ]
        assert (container.streams.video[0].width, container.streams.video[0].height) == (96, 64)
    levels = dict(frames)
    assert levels[0.0] < 20
    assert abs(levels[1.0] - 80) < 12, "with the sound that it came with"
    assert abs(levels[2.0] - 200) < 12
    assert max(later - at for at, later in pairwise(levels)) <= 1.0


def test_a_picture_of_another_shape_gets_bars(tmp_path: Path) -> None:
    """A phone that is turned would be shown stretched, or end the file."""
    data = exported(shown_session(tmp_path), "mp4")
    with av.open(io.BytesIO(data)) as container:
        last = list(container.decode(video=0))[-1].to_ndarray(format="gray")
    assert last.shape == (64, 96)
    assert last[32, 8] < 20
    assert last[32, 88] < 20
    assert last[4, 48] > 180


def test_both_voices_of_an_mp4_are_in_time(tmp_path: Path) -> None:
    """Lips and voice would part, or the voices be on the wrong side."""
    data = exported(shown_session(tmp_path), "mp4")
    with av.open(io.BytesIO(data)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    sound = np.concatenate(frames, axis=1)
    user, model = (int(np.abs(channel).argmax()) for channel in sound)
    assert abs(user - 24_000) < 48
    assert abs(model - 81_600) < 48, "half a second later than it was sent, as the user's came"


def test_an_mp4_of_sound_alone_has_no_pictures() -> None:
    """A call without a camera could not be exported."""
    with av.open(io.BytesIO(exported(AUDIO, "mp4"))) as container:
        assert [stream.type for stream in container.streams] == ["audio"]
        assert container.duration == 9_000_000


# -- MCAP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("log", [VIDEO, CHAT, PAUSED], ids=lambda log: log.name.partition(".")[0])
def test_an_mcap_opens_and_its_messages_are_what_their_schemas_say(log: Path) -> None:
    """Foxglove would refuse the file, or show a panel of errors."""
    data = exported(log, "mcap")
    reader = make_reader(io.BytesIO(data), validate_crcs=True)
    count = 0
    for schema, channel, message in reader.iter_messages(log_time_order=False):
        assert schema is not None
        assert (schema.encoding, channel.message_encoding) == ("jsonschema", "json")
        body = json.loads(message.data)
        jsonschema.validate(body, json.loads(schema.data))
        at_ns = body["timestamp"]["sec"] * 10**9 + body["timestamp"]["nsec"]
        assert at_ns == message.log_time >= message.publish_time
        count += 1
    summary = reader.get_summary()
    assert summary is not None
    assert summary.statistics is not None
    assert summary.statistics.message_count == count == len(told(log))
    assert sum(1 for _ in NonSeekingReader(io.BytesIO(data)).iter_messages()) == count
    facts = {entry.name: dict(entry.metadata) for entry in reader.iter_metadata()}
    assert facts["session"]["model"] == "scripted"


def test_an_mcap_holds_the_sound_and_pictures() -> None:
    """The viewer would show that there was something, and not what."""
    start_ns = 1_700_000_000_001 * MS
    heard: dict[str, list[tuple[int, bytes]]] = {}
    reader = make_reader(io.BytesIO(exported(VIDEO, "mcap")))
    for _, channel, message in reader.iter_messages(["/user/audio", "/model/audio", "/user/image"]):
        body = json.loads(message.data)
        data = pybase64.b64decode(body["data"])
        heard.setdefault(channel.topic, []).append((message.log_time - start_ns, data))
    sounds = [one for one in told(VIDEO) if isinstance(one, Sound)]
    for voice in ("user", "model"):
        own = [one for one in sounds if one.voice == voice]
        assert [at_ns for at_ns, _ in heard[f"/{voice}/audio"]] == [one.begin_ns for one in own]
        for (_, data), one in zip(heard[f"/{voice}/audio"], own, strict=True):
            samples = np.frombuffer(data, "<i2") / 32_767
            assert np.abs(samples - np.frombuffer(one.pcm, "<f4")).max() < 2e-5
    for _, data in heard["/user/image"]:
        assert simplejpeg.decode_jpeg(data).shape == (48, 64, 3)


@pytest.mark.parametrize("wall_ms", [1 << 64, -1, (1 << 63) // MS])
def test_an_mcap_of_a_time_that_it_cannot_hold(wall_ms: int) -> None:
    """A log whose clock was wrong could not be opened in Foxglove."""
    talk = Talk()
    talk.activate()
    begun = len(talk.records)
    talk.say(impulses(2 * SECOND))
    for index in range(2):
        talk.reply(index, impulses(24_000), "late")  # the second is heard when that is over
    late = [attrs.evolve(record, at_ns=(1 << 63) - 1) for record in talk.records[begun:]]
    file = io.BytesIO()
    write_mcap(Timeline({"wall_ms": wall_ms}, [*talk.records[:begun], *late]), file)
    times = [it.log_time for _, _, it in make_reader(io.BytesIO(file.getvalue())).iter_messages()]
    assert times == sorted(times)
    assert times[0] in {0, wall_ms * MS}
    assert times[-1] - times[0] >= 1 << 62


# -- a data set ------------------------------------------------------------------------------------


ANSWERED = ("listen", "speech", "withheld")


def samples_in(data: bytes) -> dict[str, dict[str, bytes]]:
    """Read a shard as WebDataset does: files that follow one another and share a name."""
    found: dict[str, dict[str, bytes]] = {}
    last = ""
    with tarfile.open(fileobj=io.BytesIO(data)) as shard:
        for info in shard:
            key, _, ending = info.name.partition(".")
            assert key == last or key not in found
            file = shard.extractfile(info)
            assert file is not None
            found.setdefault(key, {})[ending] = file.read()
            last = key
    return found


def body_of(sample: dict[str, bytes]) -> Any:
    return json.loads(sample["json"])


def read_wav(data: bytes) -> tuple[np.ndarray[Any, np.dtype[np.float32]], int]:
    samples, rate_hz = soundfile.read(io.BytesIO(data), dtype="float32")
    return samples, rate_hz


def test_each_answered_second_is_a_sample() -> None:
    """A trainer would learn other decisions than those of the session."""
    samples = samples_in(exported(VIDEO, "dataset"))
    with LogReader(VIDEO) as reader:
        units = [it for it in SessionStory().read(reader) if it.outcome in ANSWERED]
    assert [body_of(it)["unit"] for it in samples.values()] == [it.index for it in units]
    for sample, unit in zip(samples.values(), units, strict=True):
        heard, rate_hz = read_wav(sample["user.wav"])
        assert (len(heard), rate_hz) == (16_000, 16_000)
        assert sum(name.endswith(".jpg") for name in sample) == unit.frames
        assert body_of(sample)["codec_ids"] == list(unit.codec_ids)
        if unit.outcome != "withheld":
            assert body_of(sample)["is_listen"] == (unit.outcome == "listen")
        assert ("model.wav" in sample) == (unit.outcome == "speech")
        if unit.outcome == "speech":
            spoken, rate_hz = read_wav(sample["model.wav"])
            assert (spoken.tobytes(), rate_hz) == (unit.pcm, 24_000)
            assert body_of(sample)["text"] == unit.text
    assert any(unit.pcm for unit in units)
    assert any(unit.frames for unit in units)


def test_the_same_log_gives_the_same_bytes() -> None:
    """A data set could not be told from another by its hash."""
    assert exported(AUDIO, "dataset") == exported(AUDIO, "dataset")


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (["--kind", "audio"], {"user.wav", "model.wav", "codec_ids"}),
        (["--kind", "text"], {"text", "decided_ids"}),
        (["--kind", "video"], {"0.jpg"}),
    ],
)
def test_what_a_redaction_took_out_is_left_out(
    options: list[str], missing: set[str], tmp_path: Path
) -> None:
    """Silence would be a sample of speech, and tokens would say what was taken out."""
    log = tmp_path / "redacted.session.zst"
    CliRunner().invoke(redact_command, [str(VIDEO), "--output", str(log), *options])
    samples = samples_in(exported(log, "dataset"))
    assert samples
    for sample in samples.values():
        assert missing.isdisjoint(sample.keys() | body_of(sample).keys())
        assert body_of(sample)["lost"]


def test_a_chat_has_no_seconds(tmp_path: Path) -> None:
    """A shard without samples would be taken for one of a silent session."""
    target = tmp_path / "chat.tar"
    result = CliRunner().invoke(export_command, [str(CHAT), "--output", str(target)])
    assert result.exit_code == 2
    assert "only duplex sessions have units" in result.output
    assert not target.exists()
