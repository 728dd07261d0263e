/* The sums of a part of the session, or of the whole, and its measures. */

import { clock, count, many, span } from "./format.js";

function lengthIn(stretches, { begin, end }) {
  const length = stretches.reduce(
    (sum, it) => sum + Math.max(0, Math.min(it.end, end) - Math.max(it.begin, begin)),
    0,
  );
  return length ? span(length) : "0 s";
}

/** A part in numbers: `[name, text]` each. */
export function sumsOf({ story }, part) {
  const { talk, units, turns, said, drops, errors } = story;
  const isIn = (time) => time >= part.begin && time < part.end;
  const sums = [["length", span(part.end - part.begin)]];
  if (talk) {
    sums.push(
      ["user speaks", lengthIn(talk.user, part)],
      ["model is heard", lengthIn(talk.model, part)],
      ["both at once", lengthIn(talk.overlaps, part)],
    );
    const delays = talk.turns.filter(({ delay, answer }) => delay !== null && isIn(answer));
    if (delays.length) {
      const sorted = delays.map(({ delay }) => delay).sort((a, b) => a - b);
      const median = sorted[(sorted.length - 1) >> 1];
      const more = sorted.length > 1 ? `, at most ${span(sorted.at(-1))}` : "";
      sums.push(["response delay", `${span(median)}${more} (${many(sorted.length, "answer")})`]);
    }
    const broke = talk.barge_ins.filter(({ begin }) => isIn(begin)).length;
    if (broke) sums.push(["barge-ins", count(broke)]);
  }
  const inside = units.filter(({ started }) => isIn(started));
  if (inside.length) {
    const outcomes = new Map();
    for (const { outcome } of inside) outcomes.set(outcome, (outcomes.get(outcome) ?? 0) + 1);
    const told = [...outcomes].map(([outcome, number]) => `${count(number)} ${outcome.replace("_", " ")}`);
    sums.push(["units", `${count(inside.length)}: ${told.join(", ")}`]);
    const took = inside.filter(({ done }) => done !== null).map((it) => it.done - it.started);
    if (took.length)
      sums.push([
        "a unit takes",
        `${span(took.reduce((sum, one) => sum + one, 0) / took.length)}, at most ${span(Math.max(...took))}`,
      ]);
  }
  const asked = turns.filter(({ started }) => isIn(started)).length;
  if (asked) sums.push(["turns", count(asked)]);
  const words = said
    .filter(({ voice, begin }) => voice === "model" && isIn(begin))
    .reduce((sum, { text }) => sum + text.split(/\s+/).filter(Boolean).length, 0);
  if (words) sums.push(["model’s words", count(words)]);
  const lost = drops.filter(({ at }) => isIn(at)).length;
  if (lost) sums.push(["input dropped", many(lost, "second")]);
  const failed = errors.filter(({ at }) => isIn(at)).length;
  if (failed) sums.push(["errors", count(failed)]);
  return sums;
}

const UNITS = { share: "", count: "", s: " s" };

/** A measure's value for people. */
export function measureText({ value, unit }) {
  const number = String(Math.round(value * 1000) / 1000);
  return number + (UNITS[unit] ?? ` ${unit}`);
}

export class Sums {
  constructor(page, session) {
    this.session = session;
    this.title = page.querySelector("#sums-title");
    this.list = page.querySelector("#sums-list");
    this.clear = page.querySelector("#range-clear");
    this.play = page.querySelector("#range-play");
    const { measures } = session.story;
    page.querySelector("#measures").hidden = !measures.length;
    page.querySelector("#measures-list").replaceChildren(
      ...measures.map((it) => pair(it.name.replaceAll("_", " "), measureText(it), it.definition)),
    );
    this.show(null);
  }

  /** Show the sums of a part; null for the whole session. */
  show(range) {
    const part = range ?? { begin: 0, end: this.session.end };
    this.title.textContent = range
      ? `${clock(range.begin, 2)} to ${clock(range.end, 2)}`
      : "The whole session";
    this.clear.hidden = this.play.hidden = !range;
    this.list.replaceChildren(...sumsOf(this.session, part).map(([name, text]) => pair(name, text)));
  }
}

function pair(name, text, note = "") {
  const made = document.createElement("div");
  const term = document.createElement("dt");
  const is = document.createElement("dd");
  term.textContent = name;
  is.textContent = text;
  made.append(term, is);
  if (note) {
    const line = document.createElement("dd");
    line.className = "definition";
    line.textContent = note;
    made.append(line);
  }
  return made;
}
