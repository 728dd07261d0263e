"""The fuzzer in memory: it finds bugs that are planted, makes them small, and cries no wolf.

The planted bugs stand between a real server and its WebSocket, so that all else is as it should be.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

from protocol.values.limits import Mode
from protocol.values.state import SessionKind
from protocol.wire.dialects import DIALECTS, MODES_OF
from runtime.net.connection import WebSocket, deliver_received
from runtime.serve.routing import Route
from tests.fuzz.__main__ import fuzz_command
from tests.fuzz.campaign import Budget, Campaign, play_again, save
from tests.fuzz.case import Case, Finding, Found, Step, Tally, TranscriptError, described, read_case
from tests.fuzz.drawing import Names, all_names
from tests.fuzz.play import Handle, LocalTarget
from tests.project.sampling import sample
from tests.sessions.in_memory import append_frame, close_frame

Frame = str | bytes | None
SWALLOWED = b"(swallowed)"
"""What a hook returns for a frame that goes no further; a client's own frame may be empty."""
Hook = Callable[["Between", Frame], Frame]


class Between:
    """A WebSocket whose server has a bug: `heard` and `said` may change what passes."""

    deliver = deliver_received

    def __init__(
        self, websocket: WebSocket, *, heard: Hook | None = None, said: Hook | None = None
    ) -> None:
        self._websocket = websocket
        self._heard, self._said = heard, said
        self.seen: list[str] = []
        self.extra: list[str] = []
        self.close, self.abort = websocket.close, websocket.abort

    async def receive(self) -> Frame:
        """Receive; a hook may answer by itself, or swallow what came."""
        while True:
            frame = await self._websocket.receive()
            if self._heard is None:
                return frame
            made = self._heard(self, frame)
            await self._send_extra()
            if made != SWALLOWED:
                return made

    async def send(self, *frames: str) -> None:
        """Send; a hook may change it, or say more."""
        for frame in frames:
            self.seen.append(frame)
            made = frame if self._said is None else self._said(self, frame)
            assert isinstance(made, str)
            await self._websocket.send(made)
            await self._send_extra()

    async def _send_extra(self) -> None:
        extra, self.extra = self.extra, []
        for frame in extra:
            await self._websocket.send(frame)

    def has_said(self, word: str) -> bool:
        """Whether an event was sent."""
        return any(f'"type":"{word}"' in frame for frame in self.seen)


def planted(**hooks: Hook) -> LocalTarget:
    """Make a server with a bug."""

    def wrap(handle: Handle) -> Handle:
        async def serve(websocket: WebSocket, to: Route) -> None:
            await handle(Between(websocket, **hooks), to)  # type: ignore[arg-type]

        return serve

    return LocalTarget(wrap)


DELTA = next(
    json.dumps(message.examples[0])
    for message in described("realtime")
    if message.kind == "response.output.delta" and SessionKind.DUPLEX in message.session_kinds
)


def too_early(between: Between, frame: Frame) -> Frame:
    """Answer an append before there is a session."""
    is_append = isinstance(frame, str) and '"input.append"' in frame
    if is_append and not between.has_said("session.created"):
        between.extra.append(DELTA)
        return SWALLOWED
    return frame


def too_late(between: Between, frame: Frame) -> Frame:
    """Go on after the goodbye."""
    if isinstance(frame, str) and '"session.closed"' in frame:
        between.extra.append('{"type":"session.queue_done"}')
    return frame


def talkative(between: Between, frame: Frame) -> Frame:
    """Tell a client what went wrong within."""
    if isinstance(frame, str) and "is needed" in frame:
        body = json.loads(frame)
        body["error"]["message"] = "binascii.Error: Incorrect padding (codec.py, line 117)"
        return json.dumps(body)
    return frame


def deaf(between: Between, frame: Frame) -> Frame:
    """Never answer a stop amid a pause."""
    is_stop = isinstance(frame, str) and '"stop"' in frame
    return SWALLOWED if is_stop and between.has_said("paused") else frame


def twice(between: Between, frame: Frame) -> Frame:
    """Take a second init."""
    is_init = isinstance(frame, str) and '"session.init"' in frame
    created = [one for one in between.seen if '"session.created"' in one]
    if is_init and created and not between.has_said("session.closed"):
        between.extra.append(created[0])
        return SWALLOWED
    return frame


def greedy(between: Between, frame: Frame) -> Frame:
    """Break on a field, as a bug would."""
    if isinstance(frame, str) and '"force_listen"' in frame:
        raise RuntimeError("a bug")
    return frame


PLANTED = {
    "a delta before the init": ("realtime", {"heard": too_early}, "answer", 3),
    "an event after session.closed": ("realtime", {"said": too_late}, "answer", 1),
    "internals for a bad field": ("realtime", {"said": talkative}, "internals", 3),
    "no answer after a pause": ("legacy-duplex", {"heard": deaf}, "hang", 3),
    "a second init is taken": ("realtime", {"heard": twice}, "answer", 4),
    "a crash on a field": ("duplex-v1", {"heard": greedy}, "crash", 2),
}


FEW_PLANTED = [
    *("an event after session.closed", "internals for a bad field"),
    *("no answer after a pause", "a crash on a field"),
]
"""The quickest of each kind."""


def names_of(dialect: str) -> Names:
    """The duplex modes of a dialect."""
    return tuple(name for name in all_names() if name[0] == dialect and name[1] != "chat")


def first_found(target: LocalTarget, names: Names, seed: int = 1) -> Found:
    """Fuzz until something is found."""
    found: list[Found] = []

    class EnoughError(Exception):
        pass

    def stop(one: Found) -> None:
        found.append(one)
        raise EnoughError

    budget = Budget(examples=1500)
    with pytest.raises(EnoughError):
        Campaign(target, names, seed=seed, budget=budget, on_found=stop).run()
    return found[0]


@pytest.mark.costly
@pytest.mark.slow
@pytest.mark.parametrize("name", sample(list(PLANTED), FEW_PLANTED))
def test_a_planted_bug_is_found_and_made_small(name: str) -> None:
    """A real one of its kind would be missed, or reported as a heap of noise."""
    dialect, hooks, kind, seed = PLANTED[name]
    target = planted(**hooks)
    found = first_found(target, names_of(dialect), seed)
    assert found.finding.kind == kind, found
    assert found.case.messages <= 3, found.case.steps
    assert found.is_steady


def test_a_finding_is_kept_and_found_again(tmp_path: Path) -> None:
    """A transcript could not be handed to whoever is to fix the bug."""
    target = planted(said=too_late)
    found = first_found(target, names_of("realtime"))
    path = save(found, tmp_path / "out", 1, {"versions": {}})
    case = read_case(path)
    assert play_again(target, case).findings[0] == found.finding
    assert play_again(LocalTarget(), case).findings == ()
    steps = {"receive": False, "close": False} | {step.kind: True for step in found.outcome.told}
    assert steps["receive"]
    assert steps["close"]


@pytest.mark.slow
def test_a_server_in_order_has_no_findings_in_any_dialect() -> None:
    """Whoever runs the fuzzer would chase ghosts; or the server has a bug that was found just now.

    Each message is answered as the tables of the protocol say, by every dialect, in every state.
    """
    dialects, gates, examples = set[str](), set[str](), sample(200, 25)
    for seed in range(8, 32):  # what a seed draws depends on the modules that are loaded
        campaign = Campaign(LocalTarget(), all_names(), seed=seed, budget=Budget(examples=examples))
        tally = campaign.run()
        shown = [(one.finding, one.finding.detail, one.case.steps) for one in tally.found]
        assert shown == []
        assert tally.examples == examples
        dialects |= {pair[0].split()[0] for pair in tally.pairs}
        gates |= {pair[0].split()[1] for pair in tally.pairs}
        if dialects == set(DIALECTS):
            break
    assert dialects == set(DIALECTS)
    assert gates >= {"QUEUED", "CONNECTED", "ACTIVE"}


IMAGES = [{"type": "image", "data": {"$jpeg": "64x48"}}]
IMAGES += [{"type": "image", "data": {"$head": "image/png"}}]
FOUND: dict[str, tuple[str, Mode, tuple[tuple[str, object], ...]]] = {
    "a decoding is given up that was just over": (
        "legacy-chat",
        "chat",
        (("send", {"messages": [{"role": "user", "content": IMAGES}]}), ("await", "answer")),
    ),
    "an error that is an end, and no code of errors": (
        "legacy-duplex",
        "video",
        (
            ("await", "turn"),
            ("send", {"type": "prepare"}),
            ("await", "answer"),
            ("send_text", "{"),
            ("await", "answer"),
        ),
    ),
}
"""Small cases of what the fuzzer has found in this server."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_found_no_more(name: str) -> None:
    """A session would break again, or be measured no more."""
    dialect, mode, words = FOUND[name]
    steps = tuple(Step(kind=kind, value=value) for kind, value in words)
    case = Case(dialect=dialect, mode=mode, steps=steps)
    assert play_again(LocalTarget(), case).findings == ()


def test_the_same_seed_draws_the_same_cases() -> None:
    """A finding of a run could not be had again by its seed."""

    def run(seed: int) -> Tally:
        return Campaign(LocalTarget(), all_names(), seed=seed, budget=Budget(examples=15)).run()

    first = run(4).pairs
    assert first == run(4).pairs
    assert first != run(5).pairs


def test_a_known_finding_does_not_hide_others() -> None:
    """A run of hours would end with the first bug."""

    def both(between: Between, frame: Frame) -> Frame:
        if not isinstance(frame, str) or not frame.startswith('{"type"'):
            raise RuntimeError("another bug")
        return frame

    target = planted(heard=both, said=too_late)
    names = names_of("duplex-v1")
    tally = Campaign(target, names, seed=2, budget=Budget(examples=sample(40, 20))).run()
    assert {one.finding.kind for one in tally.found} >= {"answer", "crash"}
    assert len({one.finding for one in tally.found}) == len(tally.found)
    assert tally.repeated


def test_a_slot_that_does_not_come_back_is_found() -> None:
    """A server would be full of nobody after a night of rude clients."""

    def wrap(handle: Handle) -> Handle:
        async def serve(websocket: WebSocket, to: Route) -> None:
            await handle(Forgetful(websocket), to)  # type: ignore[arg-type]

        return serve

    class Forgetful(Between):
        """Does not notice that its client is gone."""

        async def receive(self) -> Frame:
            import anyio

            from runtime.net.connection import WebSocketClosed

            try:
                return await self._websocket.receive()
            except WebSocketClosed:
                await anyio.sleep(200)
                raise

    init = {"type": "session.init", "payload": {}}
    steps = [("await", "turn"), ("send", init), ("await", "answer"), ("fault", "reset")]
    case = Case(
        dialect="realtime",
        mode="video",
        steps=tuple(Step(kind=kind, value=value) for kind, value in steps),
    )
    assert LocalTarget().run(case).findings == ()
    assert Finding(kind="leak", label="a session goes on without its client") in (
        LocalTarget(wrap).run(case).findings
    )


# -- the command ----------------------------------------------------------------------------------


def test_the_command_says_what_it_did_as_json(tmp_path: Path) -> None:
    """A script that runs it every night could not tell what was covered."""
    out = tmp_path / "out"
    words = ["--examples", "20", "--seed", "5", "--json", "--out", str(out)]
    told = CliRunner().invoke(fuzz_command, words)
    assert told.exit_code == 0, told.output
    body = json.loads(told.stdout)
    assert body["examples"] == 20
    assert body["seed_of_run"] == 5
    assert body["findings"] == []
    assert {"state", "message", "answer", "times"} == set(body["coverage"][0])
    assert not out.exists()


def test_the_command_fuzzes_one_dialect_and_says_so_in_words(tmp_path: Path) -> None:
    """Whoever works on one dialect would wait for the others."""
    words = ["--examples", "15", "--seed", "5", "--dialect", "legacy-chat"]
    told = CliRunner().invoke(fuzz_command, words)
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith("15 cases")
    assert "legacy-chat CONNECTED" in told.stdout
    assert "realtime" not in told.stdout


@pytest.mark.parametrize("dialect", MODES_OF)
def test_each_dialect_that_the_help_names_can_be_fuzzed(dialect: str) -> None:
    """The help would offer what ends in an error."""
    told = CliRunner().invoke(
        fuzz_command, ["--examples", "1", "--seed", "1", "--dialect", dialect]
    )
    assert told.exit_code == 0, told.output


@pytest.mark.parametrize("as_json", [False, True])
def test_a_transcript_is_played_again_by_the_command(tmp_path: Path, as_json: bool) -> None:
    """A finding could be seen by its finder alone; fixed, it could not be shown to be."""
    target = planted(said=too_late)
    case = Case(
        dialect="realtime",
        mode="audio",
        steps=(
            Step(kind="await", value="turn"),
            Step(kind="send", value={"type": "session.init", "payload": {}}),
        ),
    )
    outcome = target.run(case)
    found = Found(finding=outcome.findings[0], case=case, outcome=outcome, seed=1, is_steady=True)
    path = save(found, tmp_path, 1, {})
    words = ["--again", str(path), *(["--json"] if as_json else [])]
    told = CliRunner().invoke(fuzz_command, words)
    assert told.exit_code == 0, told.output
    assert "session.created" in told.stdout
    if as_json:
        assert json.loads(told.stdout)["findings"] == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no JSON\n",
        "[]\n",
        '{"fuzz":{}}\n',
        '{"fuzz":{"dialect":"none","mode":"video"}}\n',
        '{"fuzz":{"dialect":"realtime","mode":"video"}}\n{"shout":1}\n',
        '{"fuzz":{"dialect":"realtime","mode":"video"}}\n{"fault":"explode"}\n',
        '{"fuzz":{"dialect":"realtime","mode":"video"}}\n{"send":1,"close":2}\n',
        '{"fuzz":{"dialect":"realtime","mode":"video"},"script":"none"}\n',
        '{"fuzz":{"dialect":"realtime","mode":"video"}}\n{"send":{"$pcm":1e99}}\n',
        '{"fuzz":{"dialect":"realtime","mode":"video"}}\n{"send":{"$pcm":"x"}}\n',
    ],
)
def test_a_file_that_is_no_transcript_is_one_line(tmp_path: Path, text: str) -> None:
    """A stranger's file gives a traceback, or is believed to have found nothing."""
    path = tmp_path / "case.jsonl"
    path.write_text(text, "utf-8")
    told = CliRunner().invoke(fuzz_command, ["--again", str(path)])
    assert told.exit_code == 2, told.output
    assert told.output.startswith("Error:")
    assert len(told.output.strip().splitlines()) == 1


def test_a_transcript_is_read_as_it_was_written(tmp_path: Path) -> None:
    """What is played again would be something else."""
    case = Case(
        dialect="legacy-duplex",
        mode="audio",
        script="speaks",
        slots=1,
        steps=(
            Step(kind="occupy", value="/ws/duplex/adx_fuzz"),
            Step(kind="send_text", value='{"\\ud800":"\u202e"}'),
            Step(kind="raw", value="8380"),
            Step(kind="wait_s", value=0.5),
            Step(kind="fault", value="stall"),
        ),
    )
    outcome = attrs.evolve(LocalTarget().run(case), told=case.steps)
    finding = Finding(kind="hang", label="as a test says", detail="x")
    found = Found(finding=finding, case=case, outcome=outcome, seed=9, is_steady=False)
    path = save(found, tmp_path, 1, {})
    assert read_case(path) == case
    path.write_text(path.read_text() + '{"await": "luck"}\n')
    with pytest.raises(TranscriptError, match="no await 'luck'"):
        read_case(path)


def test_helpers_frames_are_what_the_wire_takes() -> None:
    """The planted bugs would wait for words that nobody says."""
    assert json.loads(append_frame())["type"] == "input.append"
    assert json.loads(close_frame())["type"] == "session.close"
