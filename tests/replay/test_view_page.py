"""A session's page in a browser: it loads from a file, asks nobody, plays, filters, is quick.

The times that are asserted are what makes a page feel slow, several times what is measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from recorder.format.format import Record
from recorder.read.reader import LogReader
from replay.view.document import page_of
from replay.view.story import Comparison, Finding
from tests.browser.chromium import CHROMIUM, Tab, chromium
from tests.browser.view_pages import record_long
from tests.golden.logs import FOLDER
from tests.replay.test_logs import busy_scene, renumbered, write_log
from tests.replay.test_view import HOSTILE, hostile_log

__all__ = ("hostile_log",)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show a page in")

VIEW: Final = "antiphonView.view"
SHOWN: Final = "document.querySelectorAll('#rows .row').length"
LONG_UNITS: Final = 590
FRAME_MS_MAX: Final = 16
PAGE_BYTES_MAX: Final = 20_000_000


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with chromium(tmp_path_factory.mktemp("browser")) as tab:
        tab.resize(1280, 860)
        yield tab


def write_page(log: Path, folder: Path, **also: Any) -> Path:
    path = folder / f"{log.name.split('.')[0]}.html"
    with LogReader(log) as reader, path.open("wb") as file:
        file.writelines(page_of(reader.head.fields, reader, **also))
    return path


def show(tab: Tab, page: Path) -> None:
    """Open a page; it must not complain, nor ask for anything but itself."""
    tab.logged.clear()
    tab.requested.clear()
    tab.open(page)
    tab.until("document.documentElement.classList.contains('ready')")
    assert (tab.logged, tab.requested) == ([], [page.as_uri()])


@pytest.fixture
def video(tab: Tab, tmp_path: Path) -> Tab:
    """The page of a golden log with speech, failures, an interruption, drops and pictures."""
    log = FOLDER / "v1-realtime-video.session.zst"
    show(tab, write_page(log, tmp_path, replayed=True))
    return tab


def place(tab: Tab, lane: str, time: float) -> tuple[float, float]:
    """Where on the window a time is in a lane, at its middle."""
    x, y = tab.run(
        f"""(() => {{
          const {{ line }} = {VIEW};
          const lane = line.lanes.find(({{ id }}) => id === "{lane}");
          const box = line.canvas.getBoundingClientRect();
          return [box.x + line.scale.x({time}), box.y + lane.top + lane.height / 2];
        }})()"""
    )
    return x, y


def test_tells_what_happened(video: Tab) -> None:
    """The page would be empty, or tell of another session."""
    head = video.run("document.querySelector('#head').innerText")
    for words in ("rec-000001", "ended by the client", "replays as recorded", "realtime", "video"):
        assert words in head
    assert "13 units: 9 listened, 2 spoke, 1 interrupted, 1 failed" in head
    lanes = video.run("[...document.querySelectorAll('.label')].map((each) => each.innerText)")
    names = [lane.split("\n")[0] for lane in lanes]
    assert names == [
        *("Events", "User", "Video", "Model", "Talk", "Words", "State", "Units", "Queue"),
        "KV cache",
    ]
    assert video.run("document.querySelector('#row-count').innerText") == "112 records"
    painted = """(() => {
      const { canvas } = antiphonView.view.line;
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      return new Set(new Uint32Array(data.buffer)).size;
    })()"""
    video.until(f"{painted} > 20")


def test_plays_and_pauses_and_seeks(video: Tab) -> None:
    """Nothing could be heard, or what is heard would not be where the line is."""
    video.key("ArrowRight")
    video.run(f"{VIEW}.player.seek(2)")
    video.key(" ")
    video.until(f"{VIEW}.player.position > 2.3")
    assert video.run("document.querySelector('#play').getAttribute('aria-label')") == "Pause"
    assert video.run(f"[...{VIEW}.player.sources.values()].filter(Boolean).length") >= 1
    video.key(" ")
    stopped = video.run(f"{VIEW}.player.position")
    assert video.run(f"{VIEW}.player.playing") is False
    assert video.run(f"{VIEW}.player.position") == stopped < 12
    assert video.run("document.querySelector('#time').innerText") == f"0:0{int(stopped * 10) / 10}"
    box = video.run(
        "(({ x, y, width }) => [x, y, width])"
        "(document.querySelector('#overview').getBoundingClientRect())"
    )
    video.click(box[0] + box[2] / 2, box[1] + 10)
    assert video.run(f"Math.abs({VIEW}.player.position - {VIEW}.session.end / 2)") < 0.1
    assert video.logged == []


def misplaced(tab: Tab) -> Any:
    """By how many seconds each piece of sound, decoded, is longer than the place that it has."""
    return tab.run(
        f"""(async () => {{
          const {{ player }} = {VIEW};
          player.open();
          const found = [];
          for (const piece of player.pieces) {{
            const {{ duration }} = await player.decode(piece);
            found.push(duration - (piece.end - piece.begin + piece.lead));
          }}
          return found;
        }})()"""
    )


def test_every_piece_of_sound_decodes_where_it_belongs(video: Tab) -> None:
    """A voice would be heard beside where it is drawn, or not at all in a browser."""
    found = misplaced(video)
    assert len(found) == 2
    assert all(-0.001 < more < 0.008 for more in found)  # a short file's last page is not trimmed


def test_sound_is_heard_without_the_extra_media(
    tab: Tab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has no Opus would get a silent page, or none."""
    monkeypatch.setitem(sys.modules, "av", None)
    show(tab, write_page(FOLDER / "v1-realtime-video.session.zst", tmp_path))
    found = misplaced(tab)
    assert len(found) == 2
    assert all(abs(more) < 0.001 for more in found)


def test_a_voice_can_be_turned_off(video: Tab) -> None:
    """Two voices that speak at once could not be told apart."""
    x, y = video.run(
        "(({ x, y }) => [x + 8, y + 8])"
        "(document.querySelector('.voice-user').getBoundingClientRect())"
    )
    video.click(x, y)
    assert video.run(f"{VIEW}.player.muted.user") is True
    assert (
        video.run("document.querySelector('.voice-user').getAttribute('aria-pressed')") == "false"
    )


def test_filters_records(video: Tab) -> None:
    """One record among ten thousand could not be found."""
    video.key("/")
    video.type("startunit force_listen")
    assert video.run("document.querySelector('#row-count').innerText") == "1 of 112 records"
    video.key("Escape")
    assert video.run("document.querySelector('#row-count').innerText") == "112 records"
    video.key("/")
    video.type("UNITFAILED")
    assert video.run("document.querySelector('#row-count').innerText") == "1 of 112 records"
    assert video.run(SHOWN) == 1
    video.key("Escape")
    chip = "document.querySelector('.chip.group-effect')"
    x, y = video.run(f"(({{ x, y }}) => [x + 9, y + 9])({chip}.getBoundingClientRect())")
    video.click(x, y)
    shown = "[...new Set(antiphonView.view.list.shown.map((row) => row.group))].sort()"
    assert "effect" not in video.run(shown)
    assert len(video.run(shown)) == 5


def test_choosing_goes_both_ways(video: Tab) -> None:
    """A place on the line would not lead to its record, nor a record to its place."""
    failed = video.run(f"{VIEW}.session.story.units.find((unit) => unit.outcome === 'failed')")
    video.click(*place(video, "units", failed["started"] + 0.02))
    assert video.run("document.querySelector('#detail h2').innerText") == "Unit 4"
    assert video.run(f"{VIEW}.list.selected.seq") == failed["seq"]
    selected = "document.querySelector('#rows [aria-selected=true] .type').innerText"
    assert video.run(selected) == "StartUnit"
    video.run("document.querySelector('#rows').focus()")
    video.key("ArrowDown")
    assert video.run(selected) == "UnitFailed"
    after = video.run(f"{VIEW}.player.position")
    assert after == pytest.approx(failed["done"])


def test_keys_step_from_unit_to_unit_and_from_event_to_event(video: Tab) -> None:
    """A session would have to be searched by eye."""
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        video.key(key)
        seen.append(video.run("document.querySelector('#detail h2').innerText"))
    assert seen == ["Unit 1", "Unit 2", "Unit 1"]
    video.key("n")
    assert video.run("document.querySelector('#detail h2').innerText") == "inference_error"
    video.key("?")
    assert video.run("document.querySelector('#help').open") is True
    video.key("Escape", windowsVirtualKeyCode=27)
    video.until("!document.querySelector('#help').open")


def test_zooms_and_moves(video: Tab) -> None:
    """Ten minutes could be seen from afar only."""
    x, y = place(video, "user", 5)
    video.mouse("mouseWheel", x, y, deltaX=0, deltaY=-600)
    video.until(f"{VIEW}.line.scale.span < 10")
    close = video.run(f"[{VIEW}.line.scale.begin, {VIEW}.line.scale.span]")
    assert place(video, "user", 5)[0] == pytest.approx(x, abs=2)
    video.drag(x, y, x - 100, y)
    begin, span = video.run(f"[{VIEW}.line.scale.begin, {VIEW}.line.scale.span]")
    assert span == close[1]
    assert begin > close[0]
    video.key("0")
    assert video.run(f"{VIEW}.line.scale.span === {VIEW}.line.scale.whole") is True


def test_shows_findings_in_place(tab: Tab, tmp_path: Path) -> None:
    """Where two sessions part could not be seen."""
    finding = Finding(title="Differs from other: unit 3, text", detail=("here: a",), unit=3)
    comparison = Comparison(name="other", findings=[finding])
    log = FOLDER / "v1-realtime-video.session.zst"
    show(tab, write_page(log, tmp_path, comparison=comparison))
    assert "differs from other" in tab.run("document.querySelector('#pills').innerText")
    tab.click(*place(tab, "marks", 3.0))
    assert tab.run("document.querySelector('#detail').innerText").startswith(finding.title)


# -- what was said --------------------------------------------------------------------------------


def test_words_are_read_searched_copied_and_lead_to_their_sound(video: Tab) -> None:
    """What was said could be seen from afar only, a second at a time."""
    words = "[...document.querySelectorAll('.passage .words')].map((it) => it.textContent)"
    assert "unit 2 unit 3" in video.run(words)
    video.key("f")
    video.type("UNIT 3")
    assert video.run("document.querySelector('#found').textContent") == "1 of 1"
    assert video.run("CSS.highlights.get('chosen').values().next().value.toString()") == "unit 3"
    said = video.run(f"{VIEW}.session.story.said")
    assert video.run(f"{VIEW}.player.position") == pytest.approx(said[0]["begin"])
    video.key("Escape")
    copied = "document.execCommand = () => (window.copied = getSelection().toString(), true)"
    video.run(copied)
    video.run("document.querySelector('#copy').click()")
    assert "] Model: unit 2 unit 3" in video.run("window.copied")
    x, y = video.run(
        """(() => {
          const words = [...document.querySelectorAll('.words')];
          const text = words.find((it) => it.textContent === 'unit 2 unit 3').firstChild;
          const range = new Range();
          range.setStart(text, 11);
          range.setEnd(text, 12);
          range.startContainer.parentElement.scrollIntoView();
          const box = range.getBoundingClientRect();
          return [box.x + 2, box.y + box.height / 2];
        })()"""
    )
    video.click(x, y)
    assert video.run(f"{VIEW}.player.position") == pytest.approx(said[1]["begin"])


def test_a_part_is_summed_played_and_in_the_address(video: Tab) -> None:
    """How long both spoke at once between two places would be added up by hand."""
    sums = "document.querySelector('#sums').innerText"
    assert "13: 9 listen" in video.run(sums)
    _, y = place(video, "units", 1)
    video.call("Input.dispatchKeyEvent", type="keyDown", key="Shift", modifiers=8)
    for kind, at in (("mousePressed", 1), ("mouseMoved", 3.5), ("mouseReleased", 3.5)):
        at_x = place(video, "units", at)[0]
        video.mouse(kind, at_x, y, button="left", buttons=1, clickCount=1, modifiers=8)
    video.call("Input.dispatchKeyEvent", type="keyUp", key="Shift")
    begin, end = video.run(f"[{VIEW}.line.range.begin, {VIEW}.line.range.end]")
    assert (begin, end) == (pytest.approx(1, abs=0.02), pytest.approx(3.5, abs=0.02))
    assert "3: 1 listen, 2 speech" in video.run(sums)
    video.until("location.hash.includes('range=')")
    video.run(f"{VIEW}.player.setSpeed(3)")
    video.run("document.querySelector('#range-play').click()")
    video.until(f"{VIEW}.player.playing")
    video.until(f"!{VIEW}.player.playing")
    assert video.run(f"{VIEW}.player.position") == pytest.approx(end, abs=0.001)
    video.run(f"{VIEW}.player.seek(5)")
    video.key("]")
    assert video.run(f"{VIEW}.line.range.end") == 5
    video.key("Escape")
    assert "The whole session" in video.run(sums)


def test_an_address_leads_to_a_place(video: Tab) -> None:
    """A place in a session could be told to others in words only."""
    page = video.run("location.href.split('#')[0]")
    video.open(f"{page}#unit=4&t=4.05&range=2-6")
    video.until("document.querySelector('#detail h2').innerText === 'Unit 4'")
    assert video.run(f"{VIEW}.player.position") == 4.05
    assert video.run(f"{VIEW}.line.range") == {"begin": 2, "end": 6}
    video.run("location.hash = '#t=1&unit=2'")
    video.until("document.querySelector('#detail h2').innerText === 'Unit 2'")
    assert video.run("document.querySelector('#neighbours').hidden") is True


def test_plays_faster_at_its_own_pitch(video: Tab) -> None:
    """Ten minutes would take ten minutes to hear, or sound like mice."""
    video.run("s = document.querySelector('#speed'); s.value = '2'")
    video.run(f"{VIEW}.player.seek(1)")
    video.run("document.querySelector('#speed').dispatchEvent(new Event('change'))")
    video.key("f")
    video.key("Escape")
    video.key(" ")
    video.until(f"{VIEW}.player.playing && {VIEW}.player.position > 1.2")
    speed = video.run(
        f"""(async () => {{
          const {{ player }} = {VIEW};
          const [at, now] = [player.position, player.context.currentTime];
          await new Promise((done) => setTimeout(done, 400));
          return (player.position - at) / (player.context.currentTime - now);
        }})()"""
    )
    video.key(" ")
    assert speed == pytest.approx(2, abs=0.01)
    lengths = video.run(
        f"""(async () => {{
          const {{ player }} = {VIEW};
          const piece = player.pieces[0];
          return [(await player.decode(piece)).duration, piece.end - piece.begin + piece.lead];
        }})()"""
    )
    assert lengths[0] == pytest.approx(lengths[1] / 2, abs=0.01)
    assert video.logged == []


def test_hostile_text_is_text(tab: Tab, hostile_log: Path, tmp_path: Path) -> None:
    """Whoever talks to a server could run a script where its operator looks."""
    show(tab, write_page(hostile_log, tmp_path))
    assert tab.run("document.querySelector('#name').innerText") == HOSTILE[0]
    assert tab.run("document.querySelector('#pills').innerText") == HOSTILE[5]
    marks = f"{VIEW}.session.rows.filter((row) => row.kind === 'mark')"
    shown = """[...document.querySelectorAll('#detail .tree > div')]
      .find((each) => each.querySelector('dt').textContent === 'text')
      .querySelector('dd').textContent"""
    for number, text in enumerate(HOSTILE):
        tab.run(f"{VIEW}.chooseRow({marks}[{number}])")
        assert tab.run(f"{shown} === {json.dumps(text)}") is True
        tab.key("n")
    assert tab.run("document.querySelectorAll('img:not(#camera), iframe').length") == 0
    assert tab.logged == []


@pytest.mark.parametrize("name", ["v1-realtime-chat", "v1-damaged-twice", "v1-realtime-queue-full"])
@pytest.mark.parametrize(("width", "dark"), [(1400, True), (390, False)])
def test_other_sessions_and_windows(
    tab: Tab, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    """A chat, a damaged log, or one in which nothing happened would end in an empty page."""
    tab.resize(width, 820, dark=dark)
    show(tab, write_page(FOLDER / f"{name}.session.zst", tmp_path))
    for key in ("n", "ArrowRight", "+", "-", "End", "Home", "ArrowLeft"):
        tab.key(key)
    too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert tab.run(too_wide) == 0
    assert tab.barriers() == []
    assert tab.beyond_tab() == []
    assert tab.logged == []
    tab.resize(1280, 860)


def test_a_small_window_names_all_lanes(tab: Tab, tmp_path: Path) -> None:
    """On half a screen one would guess what a lane shows, and which key filters."""
    tab.resize(700, 820)
    show(tab, write_page(FOLDER / "v1-realtime-video.session.zst", tmp_path))
    names = "[...document.querySelectorAll('.label > *')].filter((it) => it.offsetWidth)"
    shown = tab.run(f"{names}.map((it) => it.innerText)")
    assert {"Events", "Words", "State", "Units"} <= set(shown)
    room = """(() => {
      const filter = document.querySelector("#filter");
      const style = getComputedStyle(filter);
      const context = document.createElement("canvas").getContext("2d");
      context.font = style.font;
      const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
      return filter.clientWidth - padding - context.measureText(filter.placeholder).width;
    })()"""
    assert tab.run(room) > 0
    tab.resize(1280, 860)


def test_an_overview_without_room_is_not_drawn(video: Tab) -> None:
    """A window, or a style of one's own, that leaves no room for it stops the lanes too."""
    video.run("document.querySelector('#overview').style.display = 'none'")
    video.run(f"{VIEW}.line.resize()")
    video.run(f"{VIEW}.line.drawNow()")
    assert video.logged == []


def test_the_head_counts_what_was_marked(tab: Tab, tmp_path: Path) -> None:
    """What somebody said of the session would be looked for in a thousand records."""
    records = busy_scene().records
    said = [
        Record(kind="mark", seq=0, at_ns=records[-2].at_ns, fields={"text": text})
        for text in ("here", "and here")
    ]
    log = write_log(tmp_path, renumbered([*records[:-1], *said, records[-1]]))
    show(tab, write_page(log, tmp_path))
    assert "· 2 marks" in tab.run("document.querySelector('#sentence').innerText")


# -- ten minutes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of nearly ten minutes, on virtual time."""
    return record_long(tmp_path_factory.mktemp("long"), LONG_UNITS)


@pytest.mark.soak  # times of a browser, which are true only where nothing else runs.
def test_ten_minutes_are_quick(tab: Tab, long_log: Path, tmp_path: Path) -> None:
    """A full session's page would be too large to send, slow to open, or stutter."""
    page = write_page(long_log, tmp_path)
    assert page.stat().st_size < PAGE_BYTES_MAX
    show(tab, page)
    assert tab.run(f"{VIEW}.session.story.units.length") == LONG_UNITS
    assert tab.run("antiphonView.readyMs") < 2000
    assert tab.run(SHOWN) < 60
    for span in (600, 60, 5):
        middle = tab.run(
            f"""(() => {{
              const {{ line }} = {VIEW};
              line.scale.show(30, {span});
              const taken = [];
              for (let i = 0; i < 60; i++) {{
                line.scale.pan(7);
                const began = performance.now();
                line.drawNow();
                taken.push(performance.now() - began);
              }}
              return taken.sort((a, b) => a - b)[30];
            }})()"""
        )
        assert middle < FRAME_MS_MAX
    filtering = tab.run(
        f"""(() => {{
          const {{ list }} = {VIEW};
          list.input.value = "startunit 588";
          const began = performance.now();
          list.filter();
          return [list.shown.length, performance.now() - began];
        }})()"""
    )
    assert filtering[0] >= 1
    assert filtering[1] < 500
