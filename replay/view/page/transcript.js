/* The transcript: what both sides said, as text to read, copy, search, and to seek by.
 *
 * What the model said is in the log. What the user said is there in a chat, and where a transcriber
 * wrote it down; else the transcript says when the user spoke.
 */

import { authorOf, lastBefore, marksOf } from "./data.js";
import { clock, count, span } from "./format.js";
import { bargeInText, turnText } from "./talk.js";

/** Words of a voice go on in one passage after a shorter silence. */
const PAUSE_S = 2;
const SPEAKERS = { user: "User", model: "Model", note: "Mark" };
const NOTES_MAX = 3;

/** What was said, in passages of one voice: `{voice, begin, end, pieces, notes}`, by time. */
export function passagesOf({ said, talk }) {
  const turns = talk?.turns ?? [];
  const hasWords = said.some(({ voice }) => voice === "user");
  const spoken = hasWords
    ? []
    : turns.map(({ begin, end }) => ({ voice: "user", begin, end, text: null }));
  const passages = [];
  for (const piece of [...said, ...spoken].sort((a, b) => a.begin - b.begin)) {
    const last = passages.at(-1);
    const goesOn = last?.voice === piece.voice && piece.text !== null && last.pieces[0].text !== null;
    if (goesOn && piece.begin - last.end < PAUSE_S) {
      last.pieces.push(piece);
      last.end = Math.max(last.end, piece.end);
    } else {
      const { voice, begin, end } = piece;
      passages.push({ voice, begin, end, pieces: [piece], notes: [] });
    }
  }
  for (const turn of turns) annotate(passages, "user", turn.end, turnText(turn));
  for (const it of talk?.barge_ins ?? [])
    annotate(passages, "model", it.begin, `the user breaks in: ${bargeInText(it)}`);
  return passages;
}

/** The passages, and the marks between them. */
export function linesOf(session) {
  const marks = marksOf(session).map((mark) => ({
    voice: "note",
    begin: mark.at,
    end: mark.end,
    pieces: [{ begin: mark.at, end: mark.end, text: mark.text }],
    notes: [
      [mark.end > mark.at && `to ${clock(mark.end)}`, authorOf(mark), mark.seq === null ? "next to the log" : "in the log"]
        .filter(Boolean)
        .join(", "),
    ],
    number: mark.is_removable ? mark.number : null,
  }));
  return [...passagesOf(session.story), ...marks].sort((a, b) => a.begin - b.begin);
}

/* Put a note where a time is: to the last passage of the voice that begins before it. */
function annotate(passages, voice, time, text) {
  const index = lastBefore(passages, time, ({ begin }) => begin);
  const found = passages.slice(0, index + 1).findLast((passage) => passage.voice === voice);
  if (found && time - found.end < PAUSE_S && found.notes.length < NOTES_MAX) found.notes.push(text);
}

/** A passage's words. */
export function wordsOf({ pieces, begin, end }) {
  if (pieces[0].text === null) return `(speaks for ${span(end - begin)})`;
  return pieces.map(({ text }) => text).join("").replace(/\s+/g, " ").trim();
}

/** The passages as text, for other programs. */
export function textOf(passages) {
  const line = (it) => `[${clock(it.begin)}] ${SPEAKERS[it.voice]}: ${wordsOf(it)}`;
  return passages.map(line).join("\n");
}

/** Where a text stands in the passages: the passage's index, and the place in its words. */
export function matchesOf(passages, wanted) {
  const found = [];
  const text = wanted.toLowerCase();
  if (!text) return found;
  passages.forEach((passage, index) => {
    const words = wordsOf(passage).toLowerCase();
    for (let at = words.indexOf(text); at >= 0; at = words.indexOf(text, at + text.length))
      found.push({ index, at });
  });
  return found;
}

export class Transcript {
  /** `on.seek(time)` is called where words are clicked, and `on.remove(number)` to remove a mark.
   * `on.range()` gives the selected part, or null. */
  constructor(page, session, on) {
    this.page = page;
    this.session = session;
    this.on = on;
    this.list = page.querySelector("#said");
    this.input = page.querySelector("#find");
    this.told = page.querySelector("#found");
    this.match = -1;
    this.fill();
    this.list.addEventListener("click", (event) => this.clicked(event));
    this.list.addEventListener("keydown", (event) => this.pressed(event));
    this.input.addEventListener("input", () => this.find());
    this.input.addEventListener("keydown", (event) => this.searched(event));
    page.querySelector("#copy").addEventListener("click", () => this.copy(page));
  }

  /** Show what was said, and the marks as they are now. */
  fill() {
    this.passages = linesOf(this.session);
    this.now = -1;
    this.matches = []; // their places are of lines that are gone
    this.page.querySelector("#transcript").hidden = !this.passages.length && !this.session.later.writes;
    this.list.replaceChildren(...this.passages.map((passage, index) => this.element(passage, index)));
    this.words = [...this.list.querySelectorAll(".words")];
    this.focusable(0);
  }

  element(passage, index) {
    const made = document.createElement("li");
    made.className = `passage ${passage.voice}`;
    made.dataset.index = String(index);
    const time = document.createElement("button");
    time.type = "button";
    time.className = "when";
    time.tabIndex = -1;
    time.textContent = clock(passage.begin);
    time.setAttribute("aria-label", `${SPEAKERS[passage.voice]}, at ${clock(passage.begin)}: go there`);
    const who = document.createElement("span");
    who.className = "who";
    who.textContent = SPEAKERS[passage.voice];
    const words = document.createElement("p");
    words.className = "words";
    words.textContent = wordsOf(passage);
    words.classList.toggle("soft", passage.pieces[0].text === null);
    made.append(time, who, words);
    for (const text of passage.notes) {
      const line = document.createElement("small");
      line.textContent = text;
      made.append(line);
    }
    if (passage.number) made.append(this.remover(passage));
    return made;
  }

  remover({ number, begin }) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "small remove";
    button.textContent = "Remove";
    button.setAttribute("aria-label", `Remove the mark at ${clock(begin)}`);
    button.addEventListener("click", () => this.on.remove(number));
    return button;
  }

  // -- seeking -----------------------------------------------------------------------------------

  clicked(event) {
    const line = event.target.closest(".passage");
    if (!line || event.target.closest(".remove") || !getSelection().isCollapsed) return; // text is being selected, to be copied
    const index = Number(line.dataset.index);
    this.on.seek(this.timeAt(index, event), index);
    this.focusable(index);
  }

  /* A click in the words is a click in the piece that they are of. */
  timeAt(index, event) {
    const { begin, pieces } = this.passages[index];
    const caret = event.target.closest(".words") && placeOf(event.clientX, event.clientY);
    if (!caret) return begin;
    let left = caret;
    for (const piece of pieces) {
      left -= (piece.text ?? "").replace(/\s+/g, " ").length;
      if (left < 0) return piece.begin;
    }
    return pieces.at(-1).begin;
  }

  pressed(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const line = event.target.closest(".passage");
    if (!step || !line) return;
    event.preventDefault();
    event.stopPropagation();
    const last = this.passages.length - 1;
    const to = Math.min(last, Math.max(0, Number(line.dataset.index) + step));
    this.focusable(to)?.focus();
  }

  /* One of the times can be reached by the tabulator, the others from it by arrows. */
  focusable(index) {
    this.list.querySelector('.when[tabindex="0"]')?.setAttribute("tabindex", "-1");
    const time = this.list.children[index]?.querySelector(".when") ?? null;
    time?.setAttribute("tabindex", "0");
    return time;
  }

  /** Mark what is being said, and where it `plays` keep it in view. */
  follow(time, plays) {
    let index = lastBefore(this.passages, time, ({ begin }) => begin);
    while (this.passages[index]?.voice === "note") index--;
    if (index === this.now) return;
    this.list.children[this.now]?.classList.remove("now");
    this.now = index;
    const line = this.list.children[index];
    line?.classList.add("now");
    if (line && plays) reveal(this.list, line);
  }

  // -- searching and copying ---------------------------------------------------------------------

  find() {
    this.matches = matchesOf(this.passages, this.input.value.trim());
    this.match = this.matches.length ? 0 : -1;
    this.mark();
  }

  searched(event) {
    if (event.key === "Escape") {
      this.input.value = "";
      this.find();
      this.input.blur();
    }
    if (event.key !== "Enter" || !this.matches.length) return;
    event.preventDefault();
    const step = event.shiftKey ? -1 : 1;
    this.match = (this.match + step + this.matches.length) % this.matches.length;
    this.mark();
  }

  /* Show the matches by ranges over the text, which stays as it is. */
  mark() {
    const length = this.input.value.trim().length;
    const ranges = this.matches.map(({ index, at }) => {
      const range = new Range();
      const text = this.words[index].firstChild;
      range.setStart(text, at);
      range.setEnd(text, Math.min(at + length, text.length));
      return range;
    });
    const chosen = ranges[this.match];
    if (globalThis.Highlight && CSS.highlights) {
      CSS.highlights.set("found", new Highlight(...ranges));
      CSS.highlights.set("chosen", new Highlight(...(chosen ? [chosen] : [])));
    }
    const wants = Boolean(this.input.value.trim());
    this.told.textContent = ranges.length
      ? `${count(this.match + 1)} of ${count(ranges.length)}`
      : wants
        ? "not found"
        : "";
    if (!chosen) return;
    const { index } = this.matches[this.match];
    reveal(this.list, this.list.children[index]);
    this.on.seek(this.passages[index].begin, index);
  }

  copy(page) {
    const range = this.on.range();
    const inRange = ({ begin, end }) => !range || (end > range.begin && begin < range.end);
    const chosen = this.passages.filter(inRange);
    const area = document.createElement("textarea");
    area.value = textOf(chosen);
    page.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy"); // a sandboxed page has no clipboard of its own
    area.remove();
    this.told.textContent = isCopied ? "copied" : "the browser does not allow it";
  }
}

/* How many characters of the words stand before a point of the window. */
function placeOf(x, y) {
  const place = document.caretPositionFromPoint?.(x, y);
  if (place) return place.offset;
  return document.caretRangeFromPoint?.(x, y)?.startOffset ?? 0;
}

/* Scroll the list, and not the page. */
function reveal(list, line) {
  const top = line.offsetTop - list.offsetTop;
  if (top >= list.scrollTop && top + line.offsetHeight <= list.scrollTop + list.clientHeight) return;
  list.scrollTop = top - list.clientHeight / 3;
}
