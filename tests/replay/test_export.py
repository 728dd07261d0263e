"""`antiphon export`: what was heard, shown and said stands where it was, in every format."""

from __future__ import annotations

import io
import json
import resource
import tracemalloc
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import attrs
import av
import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings

from protocol.values.events import ConnectionOpened
from protocol.values.messages import Delta
from protocol.wire.dialects import REALTIME
from protocol.wire.media import image_kind
from recorder.format.format import Record
from recorder.format.mapping import event_record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from replay.export import formats, timeline
from replay.export.formats import FORMATS, NoDatasetError, export_command
from replay.export.timeline import Note, Picture, Timeline, Words
from runtime.measures.talk import HELD_UP_S_MAX, Sound
from runtime.model.backends.scripted import ScriptedBackend
from tests.golden.logs import SAMPLE
from tests.replay.exported import (
    ASKED_ALOUD,
    AUDIO,
    CHAT,
    MS,
    SECOND,
    VIDEO,
    Talk,
    exported,
    impulses,
    jpeg,
    moments,
    peaks,
    read_stereo,
    told,
)
from tests.replay.test_logs import HEAD, OPENED, Scene, scenes, write_log
from tests.runtime.session.test_barge_in import begin, written
from tests.sessions.in_memory import base64, close_frame, init_frame, on_virtual_time, world


def call(*arguments: object) -> Result:
    """Run the command; whatever happens, it must not end in a traceback."""
    result = CliRunner().invoke(export_command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def talk_of_impulses() -> Talk:
    """Two seconds from the user and two from the model, at odd times, each with its impulses."""
    talk = Talk()
    talk.activate()
    talk.at(1_234_567_891)
    talk.say(impulses(SECOND, 0, 7_001))
    talk.at(1_700_000_000)
    talk.reply(0, impulses(24_000, 0, 12_345), "one")
    talk.at(2_300_000_017)
    talk.say(impulses(SECOND, 1))
    talk.at(2_777_777_777)
    talk.reply(1, impulses(9_000, 8_999), " two", ends=True)
    talk.at(5_000_000_000)
    talk.finish()
    return talk


# -- where things stand ---------------------------------------------------------------------------


def test_impulses_stand_where_the_log_has_them_to_the_sample(tmp_path: Path) -> None:
    """Whoever measures how fast a model answers would measure our export."""
    log = write_log(tmp_path, talk_of_impulses().records)
    stereo = read_stereo(exported(log, "wav"))
    user = [at_ns * 16_000 // 10**9 - SECOND for at_ns in (1_234_567_891, 2_300_000_017)]
    model = [-(-1_700_000_000 * 24_000 // 10**9), -(-2_777_777_777 * 24_000 // 10**9)]
    assert peaks(stereo[:, 0]) == [3 * at for at in (user[0], user[0] + 7_001, user[1] + 1)]
    assert peaks(stereo[:, 1]) == [2 * at for at in (model[0], model[0] + 12_345, model[1] + 8_999)]
    assert len(stereo) == 5 * 48_000


def test_sound_is_queued_behind_what_its_voice_still_says() -> None:
    """Two seconds that came at once would lie upon each other, or one of them be lost."""
    talk = Talk()
    talk.activate()
    talk.say(impulses(2 * SECOND))
    talk.at(100 * MS)
    talk.say(impulses(SECOND))
    talk.at(200 * MS)
    talk.reply(0, impulses(24_000), "a")
    talk.at(300 * MS)
    talk.reply(1, impulses(24_000), "b", ends=True)
    sounds = [one for one in moments(talk.records) if isinstance(one, Sound)]
    assert [(one.voice, one.begin, one.end) for one in sounds] == [
        ("user", 0, 32_000),
        ("model", 28_800, 52_800),
        ("user", 32_000, 48_000),
        ("model", 52_800, 76_800),
    ]


def test_a_question_that_is_sent_at_once_is_answered_after_it() -> None:
    """The answers would stand in the middle of the question, and a caption before its words."""
    talk = Talk()
    talk.activate()
    talk.at(200 * MS)
    talk.say(impulses(3 * SECOND + SECOND // 2))
    talk.reply(0)
    talk.at(300 * MS)
    talk.reply(1)
    talk.at(400 * MS)
    talk.reply(2, impulses(24_000), "so", ends=True)
    talk.at(900 * MS)
    talk.finish()
    told_of = moments(talk.records)
    sounds = [(one.voice, one.begin_ns) for one in told_of if isinstance(one, Sound)]
    assert sounds == [("user", 0), ("model", 3_100 * MS)]
    (words,) = [one for one in told_of if isinstance(one, Words)]
    assert (words.at_ns, words.begin_ns, words.end_ns) == (400 * MS, 3_100 * MS, 4_100 * MS)
    notes = {one.kind: one.begin_ns // MS for one in told_of if isinstance(one, Note)}
    assert notes["closed"] == 3_100
    ahead = [one.text for one in told_of if isinstance(one, Note) and one.kind == "ahead"]
    assert [text.split(" ahead")[0] for text in ahead] == ["the user's sound is 1.8 s"]
    assert [one.begin_ns for one in told_of] == sorted(one.begin_ns for one in told_of)


@pytest.mark.parametrize("rate_hz", [16_000, 24_000])
def test_sound_of_a_live_session_lies_where_it_was_spoken(rate_hz: int, tmp_path: Path) -> None:
    """Resampled sound would lag behind the other voice, by the half of a filter."""

    async def body() -> None:
        async with world(ScriptedBackend(), record_to=tmp_path) as server:
            peer = await begin(server, "live", rate_hz)
            sound = np.zeros(2 * rate_hz)
            sound[rate_hz // 2] = 0.5
            for piece in np.split(sound, 20):
                await anyio.sleep(0.1)
                peer.send(written("live", piece))
            await anyio.sleep(1)
            peer.leave(1000)
            await server.quiet()

    on_virtual_time(body)
    (log,) = tmp_path.iterdir()
    user = read_stereo(exported(log, "wav"))[:, 0]
    assert abs(int(np.abs(user).argmax()) - 24_000) <= 3, "in a sample of 16 kHz"


def test_a_listen_amid_a_turn_cuts_what_plays_and_its_words() -> None:
    """A model that was interrupted would be heard to go on."""
    talk = Talk()
    talk.activate()
    talk.at(1_000 * MS)
    talk.say(impulses(SECOND))
    talk.reply(0, impulses(60_000), "heard")
    talk.at(2_000 * MS)
    talk.say(impulses(SECOND))
    talk.reply(1, impulses(24_000), "never heard")
    talk.at(3_000 * MS)
    talk.say(impulses(SECOND))
    talk.reply(2)
    talk.at(6_000 * MS)
    talk.finish()
    told_of = moments(talk.records)
    said = [one for one in told_of if isinstance(one, Sound) and one.voice == "model"]
    words = [one for one in told_of if isinstance(one, Words)]
    assert [(one.begin, one.end) for one in said] == [(24_000, 72_000)]
    assert [(one.text, one.end_ns) for one in words] == [("heard", 3_000 * MS)]
    notes = [one for one in told_of if isinstance(one, Note) and one.kind == "unheard"]
    assert [(one.begin_ns, one.text) for one in notes] == [(3_000 * MS, "never heard")]


def test_an_error_amid_a_turn_does_not_end_it() -> None:
    """A model that is interrupted after a mistake of the client would be heard to go on."""
    talk = Talk()
    talk.activate()
    talk.at(1_000 * MS)
    talk.say(impulses(SECOND))
    talk.reply(0, impulses(60_000), "heard")
    talk.send('{"type": "nope"}')
    talk.at(2_000 * MS)
    talk.say(impulses(SECOND))
    talk.reply(1)
    said = [one for one in moments(talk.records) if isinstance(one, Sound)]
    assert [one.end_ns for one in said if one.voice == "model"] == [2_000 * MS]


def chat_records(*told: tuple[int, str, dict[str, Any]]) -> list[Record]:
    """Make records of a chat from its opening on: times in milliseconds, kinds and fields."""
    opened = attrs.evolve(OPENED, mode="chat")
    kind, fields = event_record(opened)
    start = [(0, "session", HEAD), (0, kind, fields), (0, "rx", {"frame": init_frame()})]
    return [
        Record(kind=kind, seq=seq, at_ns=at_ms * MS, fields=fields)
        for seq, (at_ms, kind, fields) in enumerate([*start, *told])
    ]


def delta(text: str = "", pcm: bytes = b"") -> dict[str, Any]:
    """Make a frame of an answer."""
    piece = Delta(session_id="s", response_id="r", input_id="i", text=text, pcm=pcm)
    return {"frame": REALTIME.encode(piece)[0]}


def test_words_of_an_answer_wait_a_second_for_their_sound() -> None:
    """A chat's captions would run ahead of the voice, or words be lost that nobody speaks."""
    records = chat_records(
        (100, "tx", delta("so ")),
        (500, "tx", delta("it is")),
        (900, "tx", delta(pcm=impulses(24_000))),
        (1_000, "tx", delta(" written")),
        (2_500, "effect", {"type": "Close", "code": 1000, "reason": "stopped"}),
    )
    words = [one for one in moments(records) if isinstance(one, Words)]
    assert [(one.text, one.begin_ns, one.end_ns) for one in words] == [
        ("so it is", 900 * MS, 1_900 * MS),
        (" written", 1_000 * MS, None),
    ]


def test_words_that_wait_come_before_what_follows_them() -> None:
    """Formats that are read in order of time would have to go back."""
    close = {"type": "Close", "code": 1011, "reason": "error"}
    told_of = moments(chat_records((100, "tx", delta("so ")), (500, "effect", close)))
    assert [type(one) for one in told_of] == [Words, Note]


def test_a_turn_that_has_ended_plays_to_its_end() -> None:
    """The last words of every turn would be cut by the listen that follows."""
    talk = Talk()
    talk.activate()
    talk.at(1_000 * MS)
    talk.say(impulses(SECOND))
    talk.reply(0, impulses(30_720), "bye", ends=True)
    talk.at(2_000 * MS)
    talk.say(impulses(SECOND))
    talk.reply(1)
    said = [one for one in moments(talk.records) if isinstance(one, Sound | Words)]
    played = {(one.begin_ns, one.end_ns) for one in said if one.voice == "model"}
    assert played == {(1_000 * MS, 2_280 * MS)}


@settings(max_examples=40)
@given(scenes())
def test_any_session_is_told_in_order_and_whole(scene: Scene) -> None:
    """Some odd session would have sound before it was sent, upon other sound, or lost."""
    line = Timeline({}, scene.records)
    last_ns = 0
    ends = {"user": 0, "model": 0}
    user_samples = 0
    for moment in line:
        assert moment.begin_ns >= last_ns
        last_ns = moment.begin_ns
        if isinstance(moment, Sound):
            assert moment.begin >= ends[moment.voice]
            edge_ns = moment.begin_ns if moment.voice == "model" else moment.end_ns
            follows = moment.begin == ends[moment.voice]
            held_up_ns = 0 if moment.voice == "model" else HELD_UP_S_MAX * 10**9
            assert edge_ns >= moment.at_ns - held_up_ns - 10**9 // SECOND
            assert follows or moment.voice == "model" or edge_ns <= moment.at_ns
            assert moment.end_ns <= line.duration_ns
            ends[moment.voice] = moment.end
            user_samples += (moment.end - moment.begin) * (moment.voice == "user")
    units = scene.session.counts["units"] + scene.session.units_waiting
    dropped = scene.session.counts["units_dropped"]
    assert (
        0 <= user_samples - SECOND * (units + dropped) < SECOND
        or not scene.session.counts["appends"]
    )
    assert line.story.damage_count == 0


@pytest.mark.parametrize("bytes_max", [1, 64_000, 1 << 30])
def test_held_sound_is_the_same_in_memory_and_in_a_file(
    monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    """A client faster than real time would fill the memory, or hear sound in another's place."""
    talk = Talk()
    talk.activate()
    for second in range(8):
        talk.say(np.full(SECOND, second / 10, "<f4").tobytes())
        talk.reply(second, np.full(24_000, -second / 10, "<f4").tobytes(), "x", ends=second == 7)
    monkeypatch.setattr(timeline, "HELD_BYTES_MAX", bytes_max)
    for one in moments(talk.records):
        if isinstance(one, Sound):
            second = one.begin // (SECOND if one.voice == "user" else 24_000)
            level = second / 10 if one.voice == "user" else -(second - 1) / 10
            assert (np.frombuffer(one.pcm, "<f4") == np.float32(level)).all()


def test_what_waits_is_not_copied_for_each_record() -> None:
    """A log of many small records would take hours: each would cost as much as all that wait."""
    held, count = timeline.PendingMoments(), 20_000
    for number in range(count):
        held.add(Note(begin_ns=count - number, kind="listen"))
    tracemalloc.start()
    assert list(held.ready(0)) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < count
    assert [one.begin_ns for one in held.ready(None)] == list(range(1, count + 1))


def test_what_is_moved_back_is_not_gone_through_for_each_sound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A log of many small sounds that came at once would take hours."""
    moved: list[object] = []
    move_back = timeline._move_back
    monkeypatch.setattr(timeline, "_move_back", lambda one: (moved.append(one), move_back(one)))
    held, count, at_ns = timeline.PendingMoments(), 1_000, 20 * 10**9
    for _ in range(count):
        held.sound("user", at_ns, impulses(1), is_captured=True)
        assert list(held.ready(held.lines["user"].settled_ns(at_ns))) == []
    found = [one.begin for one in held.ready(None) if isinstance(one, Sound)]
    held.close()
    assert found == list(range(20 * SECOND - count, 20 * SECOND))
    assert len(moved) <= 2 * count


# -- sessions of all kinds ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("log", SAMPLE, ids=lambda log: log.name.removesuffix(".session.zst"))
def test_every_golden_log_in_every_format(log: Path) -> None:
    """Some dialect's sessions could not be exported."""
    files = {to: exported(log, to) for to in FORMATS if to != "dataset"}
    assert all(files[to] for to in files if to != "srt")
    with suppress(NoDatasetError):  # of a chat, and of a session without an answer
        assert exported(log, "dataset")
    with LogReader(log) as reader:
        line = Timeline(reader.head.fields, reader)
        voices = {one.voice for one in line if isinstance(one, Sound) and any(one.pcm)}
    stereo = read_stereo(files["wav"])
    assert len(stereo) == -(-line.duration_ns * 48_000 // 10**9)
    has_user, has_model = stereo.any(axis=0)
    assert (has_user, has_model) == ("user" in voices, "model" in voices)
    with av.open(io.BytesIO(files["mp4"])) as container:
        assert abs((container.duration or 0) - line.duration_ns // 1000) <= 25_000


def test_a_chat_s_question_and_answer() -> None:
    """A chat would have no sound, no words, or those of the whole conversation each time."""
    spoken = [one for one in told(ASKED_ALOUD) if isinstance(one, Sound)]
    assert [(one.voice, one.begin_ns, one.end - one.begin) for one in spoken[:2]] == [
        ("user", 0, 8_000),
        ("model", 30 * MS, 4_800),
    ]
    words = [(one.voice, one.text) for one in told(CHAT) if isinstance(one, Words)]
    asked = [text for voice, text in words if voice == "user"]
    assert asked == ["hello", "what is it?", "one two three four five six"]
    answered = "".join(text for voice, text in words if voice == "model")
    assert answered.startswith("turn 0: hello (0 pictures, 0 sounds)")
    assert answered.count("turn 1: what is it?") == 1
    assert sum(isinstance(one, Picture) for one in told(CHAT)) == 1


def test_pictures_of_items_are_shown(tmp_path: Path) -> None:
    """A film of a session of `openai` would show no pictures, or hold files that are no JPEG."""
    path = CHAT.with_name("v1-openai-pictures.session.zst")
    shown = [one for one in told(path) if isinstance(one, Picture)]
    assert [round(one.begin_ns / MS) for one in shown] == [0, 0, 0, 1000]
    assert [image_kind(one.jpeg) for one in shown] == ["JPEG"] * 4
    assert shown[3].jpeg == shown[1].jpeg
    film = tmp_path / "film.mp4"
    assert call(path, "-o", film).exit_code == 0
    with av.open(film) as made:
        assert len(made.streams.video) == 1


def test_a_question_that_waits_stands_where_it_was_asked(tmp_path: Path) -> None:
    """A question aloud would be heard when its answer begins, and not when it was asked."""

    async def ask() -> None:
        async with world(ScriptedBackend(slots=1), record_to=tmp_path) as server:
            first = await server.activate("video")
            peer = await server.activate_chat()
            await anyio.sleep(1)
            content = [
                {"type": "audio", "data": base64(impulses(SECOND)), "sample_rate": SECOND},
                {"type": "image", "data": base64(jpeg(90))},
                {"type": "text", "text": "what is it?"},
            ]
            asked = {"messages": [{"role": "user", "content": content}]}
            peer.send(json.dumps({"type": "input.append", "input": asked}))
            await anyio.sleep(8)
            first.send(close_frame())
            await peer.heard("response.done")
            peer.send(close_frame())
            await peer.over()

    on_virtual_time(ask)
    found = told(max(tmp_path.iterdir()))
    assert [one.begin_ns for one in found] == sorted(one.begin_ns for one in found)
    user = [one for one in found if isinstance(one, Picture | Sound | Words)][:3]
    assert {type(one) for one in user} == {Picture, Sound, Words}
    assert {one.begin_ns for one in user} == {10**9}
    updates = [one for one in found if isinstance(one, Note) and one.kind == "queue_update"]
    assert updates
    assert all(one.begin_ns > 10**9 for one in updates)


def test_what_was_dropped_is_heard_and_told(tmp_path: Path) -> None:
    """Nobody could hear what the model did not."""
    lines = [json.loads(line) for line in exported(VIDEO, "jsonl").splitlines()]
    dropped = [line["text"] for line in lines if line["kind"] == "dropped"]
    assert dropped == ["second 8 of the input", "second 9 of the input"]
    longest = max(line["samples"] for line in lines if line["kind"] == "sound")
    assert longest == 132_000


def test_a_refused_append_is_not_heard() -> None:
    """Sound would be in the file that the session never took."""
    talk = Talk(attrs.evolve(OPENED, mode="audio"))
    talk.say(impulses(SECOND))
    talk.activate()
    talk.say(impulses(SECOND))
    sounds = [one for one in moments(talk.records) if isinstance(one, Sound)]
    assert len(sounds) == 1


def test_a_log_of_a_killed_server_goes_as_far_as_it_goes(tmp_path: Path) -> None:
    """What a client heard before a crash would be lost."""
    data = VIDEO.read_bytes()
    cut = tmp_path / VIDEO.name
    cut.write_bytes(data[: len(data) // 2])
    out = tmp_path / "cut.wav"
    result = call(cut, "-o", out, "--json")
    body = json.loads(result.stdout)
    assert (result.exit_code, body["finished"], body["damage_count"]) == (0, False, 0)
    assert 1_000 < body["duration_ms"] < 15_750
    whole, part = read_stereo(exported(VIDEO, "wav")), read_stereo(out.read_bytes())
    early = 40_000  # a resampler looks no further ahead
    assert (part[:early] == whole[:early]).all()
    assert "server was killed" in call(cut, "-o", out, "--force").stdout


def test_a_session_of_silence_is_as_long_as_it_was(tmp_path: Path) -> None:
    """A session in which nobody spoke would have no file, or one without length."""
    talk = Talk()
    talk.activate()
    talk.at(2_500 * MS)
    talk.finish()
    log = write_log(tmp_path, talk.records)
    stereo = read_stereo(exported(log, "wav"))
    assert len(stereo) == 120_000
    assert not stereo.any()
    assert exported(log, "srt") == b""
    with av.open(io.BytesIO(exported(log, "mp4"))) as container:
        assert container.duration == 2_500_000


def test_damage_is_told_and_passed_by(tmp_path: Path) -> None:
    """One bad block would cost the whole export, or be passed over in silence."""
    talk = talk_of_impulses()
    seq = next(record.seq for record in talk.records if record.kind == "unit")
    lost = Damage(offset=0, length=1, reason="record", detail="lost", first_seq=seq, records=1)
    found = moments([*talk.records[:seq], lost, *talk.records[seq + 1 :]])  # type: ignore[list-item]
    assert Counter(one.kind for one in found if isinstance(one, Note))["damage"] == 1
    assert sum(isinstance(one, Sound) and one.voice == "user" for one in found) == 2
    assert sum(isinstance(one, Sound) and one.voice == "model" for one in found) == 2


# -- the command ----------------------------------------------------------------------------------


def test_the_format_is_the_suffix_s_unless_told(tmp_path: Path) -> None:
    """`-o call.mp4` would give a WAV."""
    for name, kind in {"a.WAV": b"RIFF", "b.mcap": b"\x89MCAP"}.items():
        assert call(VIDEO, "-o", tmp_path / name).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(kind)
    result = call(VIDEO, "--to", "srt", "-o", tmp_path / "odd.wav")
    assert (tmp_path / "odd.wav").read_bytes().startswith(b"1\n00:")
    assert result.stdout.startswith(str(tmp_path / "odd.wav"))
    log = tmp_path / "rec-1.session.zst"
    log.write_bytes(VIDEO.read_bytes())
    assert call(log, "--to", "vtt").exit_code == 0
    assert (tmp_path / "rec-1.vtt").read_bytes().startswith(b"WEBVTT")
    assert call(log).exit_code == 2
    assert call(log, "-o", tmp_path / "what.xyz").exit_code == 2


def test_json_tells_what_was_written(tmp_path: Path) -> None:
    """A script could not tell a whole session from half of one."""
    body = json.loads(call(AUDIO, "--to", "wav", "-o", tmp_path / "a.wav", "--json").stdout)
    assert body == {
        "log": str(AUDIO),
        "output": str(tmp_path / "a.wav"),
        "format": "wav",
        "duration_ms": 9000.0,
        "bytes": (tmp_path / "a.wav").stat().st_size,
        "finished": True,
        "damage_count": 0,
    }


def test_text_may_go_to_stdout() -> None:
    """`antiphon export ... | jq` would need a file in between."""
    result = call(VIDEO, "--to", "jsonl", "-o", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout_bytes == exported(VIDEO, "jsonl")
    assert call(VIDEO, "--to", "wav", "-o", "-").exit_code == 2


def test_what_fails_leaves_nothing_and_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a file would be taken for a whole one, or the last good one be gone."""
    out = tmp_path / "call.wav"
    assert call(VIDEO, "-o", out).exit_code == 0
    before = out.read_bytes()

    def broken(timeline: Timeline, file: Any) -> None:
        file.write(b"half")
        next(iter(timeline))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(formats, "_WRITERS", dict.fromkeys(FORMATS, broken))
    result = call(VIDEO, "-o", out, "--force")
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "No space left" in result.stderr
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("to", ["wav", "mp4", "mcap", "jsonl"])
def test_a_full_disk_is_one_line_that_names_the_output(tmp_path: Path, to: str) -> None:
    """Somebody would suspect the log, or see tracebacks of what writes the format."""
    out = tmp_path / f"call.{to}"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        result = call(VIDEO, "-o", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (result.exit_code, result.stderr) == (2, f"Error: {out}: File too large\n")
    assert list(tmp_path.iterdir()) == []


def test_never_writes_over_a_log(tmp_path: Path) -> None:
    """A slip of the fingers would cost a recording: the one that is read, or another."""
    log, other, odd = (tmp_path / name for name in ("a.session.zst", "b.session.zst", "c.log"))
    link = tmp_path / "link"
    link.symlink_to(log)
    for path in (log, other, odd):
        path.write_bytes(VIDEO.read_bytes())
    for source, output in ((log, log), (log, other), (log, link), (link, log), (odd, odd)):
        result = call(source, "--to", "jsonl", "-o", output)
        assert (result.exit_code, "would be overwritten" in result.stderr) == (2, True)
    assert {path.read_bytes() for path in (log, other, odd, link)} == {VIDEO.read_bytes()}
    assert link.is_symlink()


@pytest.mark.parametrize("to", ["wav", "mp4"])
def test_silence_without_end_is_not_written(tmp_path: Path, to: str) -> None:
    """A log that names a time in a hundred years would fill the disk with silence."""
    talk = talk_of_impulses()
    late = attrs.evolve(talk.records[-1], at_ns=1 << 62)
    log = write_log(tmp_path, [*talk.records[:-1], late])
    result = call(log, "--to", to, "-o", tmp_path / "out")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "goes on until 4611686018 s" in result.stderr
    assert list(tmp_path.iterdir()) == [log]
    assert call(log, "--to", "jsonl", "-o", tmp_path / "out").exit_code == 0


def test_what_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    """A wrong path would end in a traceback."""
    junk = tmp_path / "junk.session.zst"
    junk.write_bytes(b"no log at all" * 50)
    for arguments in (
        (tmp_path / "none.session.zst", "--to", "wav"),
        (junk, "--to", "wav"),
        (VIDEO, "-o", tmp_path / "no" / "folder" / "x.wav"),
    ):
        result = call(*arguments)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert list(tmp_path.iterdir()) == [junk]


def test_a_log_without_its_first_event_is_exported_as_well_as_can_be() -> None:
    """A log whose start is damaged could not be heard."""
    talk = talk_of_impulses()
    first = ConnectionOpened.__name__
    rest = [record for record in talk.records if record.fields.get("type") != first]
    found = moments(rest)
    assert sum(isinstance(one, Sound) for one in found) >= 2
