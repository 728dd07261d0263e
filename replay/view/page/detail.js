/* The panel next to the list: the record or unit that is selected, whole; else the settings.
 *
 * Values are shown as a tree, long texts folded. All of it is put in as text.
 */

import { clock, many } from "./format.js";
import { deadlineOf, outcomeOf, stagesOf, unitLines, turnLines } from "./units.js";

const FOLD_CHARS = 280;

function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Show a record. */
export function showRecord(place, row) {
  place.replaceChildren(
    heading(row.type || row.kind, `${clock(row.at, 3)}, record ${row.seq}, ${row.kind}`),
    tree(opened(row.fields)),
  );
}

/** Show a unit, and the record that started it. */
export function showUnit(place, unit, row) {
  const parts = [
    heading(`Unit ${unit.index}`, `${outcomeOf(unit)}, started at ${clock(unit.started, 3)}`),
    stageBar(unit),
    lines(unitLines(unit)),
  ];
  if (row) parts.push(make("h3", "", `record ${row.seq}, ${row.type}`), tree(row.fields));
  place.replaceChildren(...parts);
}

/** Show a turn of chat. */
export function showTurn(place, turn) {
  const title = heading(
    `Turn ${turn.index}`,
    `${turn.outcome.replace("_", " ")}, at ${clock(turn.started, 3)}`,
  );
  place.replaceChildren(title, lines(turnLines(turn)));
}

/** Show something that has no record of its own, or more to say than its record. */
export function showThing(place, thing, row) {
  const parts = [heading(thing.title, clock(thing.at, 3)), lines(thing.lines)];
  if (row)
    parts.push(
      make("h3", "", `record ${row.seq}, ${row.kind} ${row.type}`),
      tree(opened(row.fields)),
    );
  place.replaceChildren(...parts);
}

/** Show what the session was set up with. */
export function showSession(place, { story, rows }) {
  const parts = [heading("The session", many(rows.length, "record"))];
  if (story.instructions) parts.push(make("h3", "", "prompt"), text(story.instructions));
  const head = rows.find((row) => row.kind === "session");
  if (head) parts.push(make("h3", "", "recorded with"), tree(head.fields));
  place.replaceChildren(...parts);
}

function heading(title, note) {
  const made = make("header");
  made.append(make("h2", "", title), make("p", "soft", note));
  return made;
}

function lines(texts) {
  const made = make("ul", "lines");
  made.append(...texts.map((each) => make("li", "", each)));
  return made;
}

/** The stages of a unit, each as long as it took, in the second that it had. */
function stageBar(unit) {
  const made = make("div", "stages");
  const stages = stagesOf(unit);
  const begin = unit.arrived ?? unit.started;
  const took = stages.reduce((sum, [, seconds]) => sum + seconds, 0);
  const whole = Math.max(took, deadlineOf(unit) - begin);
  for (const [name, seconds] of stages) {
    const bar = make("span", `stage stage-${name.replace(" ", "-")}`);
    bar.style.width = `${(100 * seconds) / whole}%`;
    bar.title = name;
    made.append(bar);
  }
  const due = make("span", "due");
  due.style.left = `${(100 * (deadlineOf(unit) - begin)) / whole}%`;
  made.append(due);
  return made;
}

/* A frame is JSON in text: it is read where it can be. */
function opened(fields) {
  if (typeof fields.frame !== "string") return fields;
  try {
    return { ...fields, frame: JSON.parse(fields.frame) };
  } catch {
    return fields;
  }
}

function tree(value) {
  const made = make("dl", "tree");
  for (const [name, item] of Array.isArray(value) ? value.entries() : Object.entries(value)) {
    const row = make("div");
    row.append(make("dt", "", String(name)), shown(item));
    made.append(row);
  }
  return made;
}

function shown(value) {
  const made = make("dd");
  if (value === null || typeof value !== "object") {
    if (typeof value === "string") made.append(text(value));
    else made.append(make("span", "value", String(value)));
    return made;
  }
  const isPlain =
    Array.isArray(value) && value.every((item) => item === null || typeof item !== "object");
  if (isPlain && value.length <= 8) {
    made.append(make("span", "value", value.length ? value.join(", ") : "none"));
    return made;
  }
  const folded = make("details");
  const size = Array.isArray(value)
    ? many(value.length, "item")
    : many(Object.keys(value).length, "field");
  folded.append(make("summary", "soft", size));
  folded.open = !Array.isArray(value);
  folded.append(isPlain ? text(value.join(", ")) : tree(value));
  made.append(folded);
  return made;
}

function text(value) {
  if (value.length <= FOLD_CHARS) return make("span", "value", value || "empty");
  const made = make("span", "value", `${value.slice(0, FOLD_CHARS)}… `);
  const button = make("button", "more", `show all ${value.length} characters`);
  button.type = "button";
  button.addEventListener("click", () => made.replaceChildren(value));
  made.append(button);
  return made;
}
