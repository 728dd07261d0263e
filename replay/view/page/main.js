/* The page: puts its parts together, and hears the keyboard. */

import { neighboursOf, readAddress, writeAddress } from "./address.js";
import { lastBefore, readSession, rowAt, savedOf } from "./data.js";
import { happeningsOf } from "./happenings.js";
import { clock } from "./format.js";
import { lanesOf } from "./lanes.js";
import { Player } from "./player.js";
import { RecordList } from "./list.js";
import { Marks, placeOfMark } from "./marks.js";
import { showRecord, showSession, showThing, showTurn, showUnit } from "./detail.js";
import { showHeader } from "./header.js";
import { Sums } from "./sums.js";
import { TimeLine } from "./timeline.js";
import { Transcript } from "./transcript.js";

const FOLLOW_SPAN_S = 12;
const ZOOM_STEP = 1.5;
/** A part that is shorter is a slip of the hand. */
const RANGE_S_MIN = 0.05;
const ADDRESS_MS = 250;

class View {
  constructor(page, session) {
    this.page = page;
    this.session = session;
    this.detail = page.querySelector("#detail");
    this.camera = page.querySelector("#camera");
    this.button = page.querySelector("#play");
    this.time = page.querySelector("#time");
    this.overview = page.querySelector("#overview");
    this.shownPicture = -1;
    this.follows = true;
    this.player = new Player(session, () => this.moved());
    this.list = new RecordList(page, session.rows, (row) => this.chooseRow(row));
    const on = {
      seek: (time) => this.player.seek(time),
      choose: (thing, time) => this.choose(thing, time),
      looked: () => this.looked(),
      marked: (range) => this.mark(range),
    };
    this.chosen = {};
    this.sums = new Sums(page, session);
    this.transcript = new Transcript(page, session, {
      seek: (time) => this.goTo(time),
      range: () => this.line.range,
      remove: (number) => this.marks.remove(number),
    });
    session.happenings = happeningsOf(session);
    this.marks = new Marks(page, session, {
      place: () => placeOfMark(this.line.range, this.player.position),
      changed: () => this.remarked(),
      found: (replay) => this.showReplay(replay),
    });
    this.line = new TimeLine(page, session, lanesOf(session), this.player, on);
    page.querySelector("#length").textContent = clock(session.end, 1);
    showHeader(page, session);
    showSession(this.detail, session);
    this.bind();
    this.moved();
    this.goToAddress();
  }

  // -- choosing ----------------------------------------------------------------------------------

  /** A row was chosen: show it, and where it is on the time line. */
  chooseRow(row) {
    this.chosen = { seq: row.seq };
    this.list.select(row);
    this.line.selected = { at: row.at };
    this.line.scale.reveal(row.at, 0.4);
    this.showFor(row);
    if (!this.player.playing) this.player.seek(row.at);
    this.line.draw();
  }

  /** Something on the time line was chosen, or a place where there is nothing. */
  choose(thing, time) {
    this.player.seek(thing ? Math.max(thing.at, 0) : time);
    const at = thing ? thing.at : time;
    this.chosen = { unit: thing?.unit?.index, turn: thing?.turn?.index };
    this.keepAddress();
    const row =
      thing && thing.seq !== null ? rowAt(this.session.rows, thing.seq) : this.rowBefore(at);
    this.line.selected = thing ? { at } : null;
    this.list.select(row);
    if (thing) this.showThing(thing, row);
    else if (row) this.showFor(row);
    this.line.draw();
  }

  rowBefore(time) {
    const { rows } = this.session;
    return rows[lastBefore(rows, time, (row) => row.at)] ?? rows[0] ?? null;
  }

  showThing(thing, row) {
    if (thing.unit) showUnit(this.detail, thing.unit, row);
    else if (thing.turn) showTurn(this.detail, thing.turn);
    else showThing(this.detail, thing, thing.seq === null ? null : row);
    this.detail.scrollTop = 0;
  }

  showFor(row) {
    const unit =
      row.type === "StartUnit" ? this.session.story.units.find(({ seq }) => seq === row.seq) : null;
    if (unit) showUnit(this.detail, unit, row);
    else showRecord(this.detail, row);
    this.detail.scrollTop = 0;
  }

  /** Go to the next or last place of some, and choose what is there. */
  step(places, direction) {
    const now = this.player.position;
    const next =
      direction > 0
        ? places.find(({ at }) => at > now + 0.001)
        : places.findLast(({ at }) => at < now - 0.001);
    if (!next) return;
    this.choose(next, next.at);
    this.line.scale.reveal(next.at, 0.4);
  }

  /** The units, or in a chat the turns, as what can be chosen. */
  get things() {
    const { units, turns } = this.session.story;
    const of = (name, it) => ({
      title: "",
      lines: [],
      at: it.started,
      seq: it.seq ?? null,
      [name]: it,
    });
    return units.length ? units.map((it) => of("unit", it)) : turns.map((it) => of("turn", it));
  }

  stepUnit(direction) {
    const { things } = this;
    if (things.length) this.step(things, direction);
    else this.player.seek(this.player.position + direction);
  }

  /** Go to a time, and show it. */
  goTo(time) {
    this.chosen = {};
    this.player.seek(time);
    this.line.scale.reveal(time, 0.4);
    this.line.draw();
  }

  // -- marks, and a replay -----------------------------------------------------------------------

  /** The marks are others than before. */
  remarked() {
    const { session } = this;
    session.happenings.splice(0, Infinity, ...happeningsOf(session));
    this.transcript.fill();
    showHeader(this.page, session);
    this.line.overviewLayer = null;
    this.tick();
  }

  showReplay({ tone, title, lines, divergence }) {
    const place = this.page.querySelector("#replayed");
    const line = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    place.hidden = false;
    place.className = `notice ${tone}`;
    place.replaceChildren(line("strong", title), ...lines.map((text) => line("span", text)));
    const row = divergence ? rowAt(this.session.rows, divergence.seq) : null;
    if (!row) return;
    const button = Object.assign(line("button", `Show record ${row.seq}`), { type: "button", className: "small" });
    button.addEventListener("click", () => this.chooseRow(row));
    place.append(button);
  }

  // -- a part, and the address -------------------------------------------------------------------

  /** Select a part; null selects none. */
  mark(range) {
    const begin = Math.max(0, range?.begin ?? 0);
    const end = Math.min(this.session.end, range?.end ?? 0);
    this.line.range = end - begin >= RANGE_S_MIN ? { begin, end } : null;
    this.sums.show(this.line.range);
    this.marks.showPlace();
    this.line.draw();
    this.keepAddress();
  }

  /* One end of the part is where playing is; the other stays, or is that of the session. */
  markEnd(end) {
    const now = this.player.position;
    const { range } = this.line;
    const other = range?.[end === "begin" ? "end" : "begin"];
    if (end === "begin") this.mark({ begin: now, end: other > now ? other : this.session.end });
    else this.mark({ begin: other < now ? other : 0, end: now });
  }

  /** Put the place into the page's address, a moment later; not while it plays. */
  keepAddress() {
    clearTimeout(this.keeping);
    this.keeping = setTimeout(() => {
      if (this.player.playing) return;
      const { unit = null, turn = null, seq = null } = this.chosen;
      const address = writeAddress({ t: this.player.position, unit, turn, seq, range: this.line.range });
      if (address !== location.hash) history.replaceState(null, "", address);
    }, ADDRESS_MS);
  }

  /** Go to the place of the page's address. */
  goToAddress() {
    const { t, unit, turn, seq, range } = readAddress(location.hash);
    const thing = this.things.find(
      (it) => it.unit?.index === (unit ?? -1) || it.turn?.index === (turn ?? -1),
    );
    const row = seq === null ? null : rowAt(this.session.rows, seq);
    if (thing) this.choose(thing, thing.at);
    else if (row) this.chooseRow(row);
    if (range) this.mark(range);
    if (t !== null) this.player.seek(t);
    if (thing || row || range || t !== null)
      this.line.scale.reveal(range?.begin ?? this.player.position, 0.4);
  }

  // -- playing -----------------------------------------------------------------------------------

  moved() {
    const { playing } = this.player;
    this.follows = true;
    this.button.setAttribute("aria-label", playing ? "Pause" : "Play");
    this.button.classList.toggle("playing", playing);
    const failure = this.page.querySelector("#failure");
    failure.hidden = this.player.failed === null;
    failure.textContent = this.player.failed ?? "";
    this.keepAddress();
    this.tick();
  }

  tick() {
    const now = this.player.position;
    this.time.textContent = clock(now, 1);
    this.overview.setAttribute("aria-valuenow", now.toFixed(1));
    this.overview.setAttribute("aria-valuetext", clock(now, 1));
    this.showPicture(now);
    this.showTalk(now);
    this.transcript.follow(now, this.player.playing);
    this.marks.showPlace();
    this.line.draw();
    if (!this.player.playing) return;
    this.follows ||= this.isSeen(now);
    if (this.follows) this.line.scale.reveal(now, 0.1);
    if (now >= this.player.limit) this.player.pause();
    else if (!this.ticking) {
      this.ticking = true;
      requestAnimationFrame(() => {
        this.ticking = false;
        this.tick();
      });
    }
  }

  /* A reader who looks elsewhere while it plays stays there. */
  looked() {
    this.follows = this.isSeen(this.player.position);
  }

  isSeen(time) {
    return time >= this.line.scale.begin && time <= this.line.scale.end;
  }

  /** Show what the camera showed last. */
  showPicture(time) {
    const { pictures } = this.session;
    const index = Math.max(
      0,
      lastBefore(pictures, time, (picture) => picture.at),
    );
    const picture = pictures[index];
    if (!picture || picture.first === this.shownPicture) return;
    this.shownPicture = picture.first;
    this.camera.hidden = picture.jpeg === null;
    if (picture.jpeg !== null) this.camera.src = `data:image/jpeg;base64,${picture.jpeg}`;
  }

  /** Play; from afar, so close that one can follow. */
  toggle() {
    if (!this.player.playing && this.line.scale.span > 8 * FOLLOW_SPAN_S) {
      this.line.scale.show(this.player.at - 1, 2 * FOLLOW_SPAN_S);
    }
    this.player.toggle();
  }

  zoom(factor) {
    const now = this.player.position;
    this.line.scale.zoom(factor, this.isSeen(now) ? this.line.scale.x(now) : undefined);
    this.line.draw();
  }

  fit() {
    this.line.scale.fit();
    this.line.draw();
  }

  // -- buttons and keys --------------------------------------------------------------------------

  bind() {
    const help = this.page.querySelector("#help");
    const click = (id, action) => this.page.querySelector(id).addEventListener("click", action);
    click("#play", () => this.toggle());
    click("#closer", () => this.zoom(ZOOM_STEP));
    click("#farther", () => this.zoom(1 / ZOOM_STEP));
    click("#fit", () => this.fit());
    click("#show-help", () => help.showModal());
    click("#close-help", () => help.close());
    click("#range-begin", () => this.markEnd("begin"));
    click("#range-end", () => this.markEnd("end"));
    click("#range-clear", () => this.mark(null));
    click("#range-play", () => this.player.playPart(this.line.range));
    const speed = this.page.querySelector("#speed");
    speed.addEventListener("change", () => this.player.setSpeed(Number(speed.value)));
    window.addEventListener("hashchange", () => this.goToAddress());
    this.showNeighbours();
    this.overview.setAttribute("aria-valuemax", this.session.end.toFixed(1));
    this.keys = {
      " ": () => this.toggle(),
      ArrowRight: () => this.stepUnit(1),
      ArrowLeft: () => this.stepUnit(-1),
      "+": () => this.zoom(ZOOM_STEP),
      "=": () => this.zoom(ZOOM_STEP),
      "-": () => this.zoom(1 / ZOOM_STEP),
      0: () => this.fit(),
      Home: () => this.player.seek(0),
      End: () => this.player.seek(this.session.end),
      n: () => this.step(this.line.happenings, 1),
      N: () => this.step(this.line.happenings, -1),
      "/": () => this.list.input.focus(),
      f: () => this.transcript.input.focus(),
      "[": () => this.markEnd("begin"),
      "]": () => this.markEnd("end"),
      m: () => this.marks.open(),
      "?": () => help.showModal(),
      Escape: () => this.clear(),
    };
    this.page.addEventListener("keydown", (event) => this.pressed(event));
  }

  /* Where a server shows this session: those before and after, and one that goes on from it. */
  showNeighbours() {
    const found = neighboursOf(location);
    this.page.querySelector("#neighbours").hidden = found === null;
    this.talk = this.page.querySelector("#talk-on");
    this.past = found ? this.session.story.units.filter(({ finalized }) => finalized !== null) : [];
    this.talk.hidden = !this.past.length;
    for (const [name, address] of Object.entries(found ?? {}))
      this.page.querySelector(`#${name === "talk" ? "talk-on" : name}`).href = address;
  }

  /** A conversation that is talked on begins with the units that are over by now; before it was played, with all. */
  showTalk(now) {
    if (!this.past.length) return;
    const unit = (this.past[lastBefore(this.past, now, ({ finalized }) => finalized)]?.index ?? -1) + 1;
    this.talk.search = now ? `?to=talk&unit=${unit}` : "?to=talk";
    const text = now ? `Talk on from second ${unit}` : "Talk on";
    if (this.talk.textContent !== text) this.talk.textContent = text;
  }

  clear() {
    this.chosen = {};
    this.mark(null);
    this.line.selected = null;
    this.list.select(null);
    showSession(this.detail, this.session);
    this.line.draw();
  }

  pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.page.querySelector("#help").open)
      return;
    const { target } = event;
    if (target === this.list.input) {
      if (event.key === "Escape") this.leaveFilter();
      return;
    }
    if (target.matches("input, select, textarea")) return;
    if (event.key === " " && target.matches("button, summary, a")) return;
    const action = this.keys[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  leaveFilter() {
    this.list.input.value = "";
    this.list.filter();
    this.list.input.blur();
  }
}

function begin() {
  const began = performance.now();
  try {
    const session = readSession(document);
    if (!neighboursOf(location)) session.later = savedOf(session.later);
    const view = new View(document, session);
    document.documentElement.classList.add("ready");
    window.antiphonView = { view, readyMs: performance.now() - began };
  } catch (error) {
    const failure = document.querySelector("#failure");
    failure.hidden = false;
    failure.textContent = error.message;
    throw error;
  }
}

begin();
