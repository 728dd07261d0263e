/* What the page was told: the blocks of data in the file, read once and put together.
 *
 * Times are seconds of the session's clock from here on: all that draws and plays counts in them.
 * Everything in here may come from a stranger: it is shown with `textContent`, and no other way.
 */

const NS_PER_S = 1e9;

/* The groups by which records are told apart in the list. */
export const GROUPS = {
  client: ["rx"],
  server: ["tx"],
  model: ["prepare", "unit", "turn", "chunk", "finalize", "rollback"],
  event: ["event"],
  effect: ["effect"],
  log: ["session", "state", "mark", "elided", "fin"],
};
const GROUP_OF = new Map(
  Object.entries(GROUPS).flatMap(([group, kinds]) => kinds.map((kind) => [kind, group])),
);

/** Bytes of base64. */
export function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

/** A session out of its parts, each `[name, value]`. */
export function assemble(parts) {
  const rows = [];
  const sounds = { user: [], model: [] };
  const pictures = [];
  let story = null;
  let later = { marks: [], damaged: 0 };
  for (const [name, value] of parts) {
    if (name === "rows") for (const row of value) rows.push(rowOf(row));
    else if (name === "sound") sounds[value.voice].push(soundOf(value));
    else if (name === "picture") pictures.push(pictureOf(value, pictures));
    else if (name === "story") story = storyOf(value);
    else if (name === "later") later = value;
  }
  if (story === null) throw new Error("the page is not whole: it was cut off while it was written");
  const ends = Object.values(sounds).flatMap((pieces) =>
    pieces.slice(-1).map((piece) => piece.end),
  );
  const end = Math.max(story.duration, ...ends, 0.1);
  return { rows, sounds, pictures, story, later, end };
}

/** What a page shows that no server sends now: its marks, which it cannot change. */
export function savedOf({ marks, damaged }) {
  return { marks: marks.map((mark) => ({ ...mark, is_removable: false })), damaged };
}

/** All marks of a session, of its log and next to it, by time. */
export function marksOf({ story, later }) {
  const own = story.marks.filter(({ kind, fields }) => kind === "mark" && typeof fields.text === "string");
  return [
    ...own.map(({ at, seq, fields }) => ({ at, end: at, seq, text: fields.text, by: fields.by ?? "" })),
    ...later.marks.map(({ at_ms, end_ms, ...mark }) => ({ ...mark, at: at_ms / 1e3, end: end_ms / 1e3, seq: null })),
  ].sort((a, b) => a.at - b.at);
}

/** Who wrote a mark, and when. */
export function authorOf({ by, written_ms }) {
  const when = written_ms === undefined ? "" : `${new Date(written_ms).toISOString().replace("T", " ").slice(0, 16)} UTC`;
  return [by, when].filter(Boolean).join(", ");
}

/** The session in a document; its blocks of data are taken out, for they are large. */
export function readSession(page) {
  const blocks = [...page.querySelectorAll("script[data-part]")];
  const session = assemble(
    blocks.map((block) => [block.dataset.part, JSON.parse(block.textContent)]),
  );
  for (const block of blocks) block.remove();
  return session;
}

function rowOf([seq, at_ns, kind, type, fields]) {
  return {
    seq,
    at: at_ns / NS_PER_S,
    kind,
    type,
    fields,
    group: GROUP_OF.get(kind) ?? "log",
    search: null,
  };
}

function soundOf({ voice, begin_ns, end_ns, lead_s, file, peaks }) {
  return {
    voice,
    begin: begin_ns / NS_PER_S,
    end: end_ns / NS_PER_S,
    lead: lead_s,
    file,
    levels: null,
    peaks,
  };
}

function pictureOf({ at_ns, bytes, jpeg, same_as }, before) {
  const shown = same_as === undefined ? jpeg : before[same_as]?.jpeg;
  return { at: at_ns / NS_PER_S, bytes, jpeg: shown ?? null, first: same_as ?? before.length };
}

function seconds(ns) {
  return ns === null || ns === undefined ? null : ns / NS_PER_S;
}

function unitOf(unit, { forced_units, near_tie_logits }) {
  return {
    ...unit,
    margin: unit.margin ?? null,
    isFirst: unit.index < forced_units,
    isNearTie: (unit.margin ?? Infinity) < near_tie_logits,
    arrived: seconds(unit.arrived_ns),
    started: seconds(unit.started_ns),
    done: seconds(unit.done_ns),
    finalized: seconds(unit.finalized_ns),
    undone: seconds(unit.undone_ns),
  };
}

function turnOf(turn) {
  return {
    ...turn,
    started: seconds(turn.started_ns),
    prefilled: seconds(turn.prefilled_ns),
    done: seconds(turn.done_ns),
  };
}

function talkOf({ user, model, overlaps, turns, barge_ins }) {
  const stretch = ([begin, end]) => ({ begin: begin / NS_PER_S, end: end / NS_PER_S });
  return {
    user: user.map(stretch),
    model: model.map(stretch),
    overlaps: overlaps.map(stretch),
    turns: turns.map(({ begin_ns, end_ns, delay_ns, answer_ns, is_silent }) => ({
      ...stretch([begin_ns, end_ns]),
      delay: seconds(delay_ns),
      answer: seconds(answer_ns),
      is_silent,
    })),
    barge_ins: barge_ins.map(({ begin_ns, end_ns, is_yielded_to }) => ({
      ...stretch([begin_ns, end_ns]),
      is_yielded_to,
    })),
  };
}

function lineOf(points) {
  return points.map(([at_ns, ...values]) => [at_ns / NS_PER_S, ...values]);
}

function storyOf(told) {
  return {
    ...told,
    duration: told.duration_ns / NS_PER_S,
    units: told.units.map((unit) => unitOf(unit, told)),
    calls: told.calls.map((call) => ({
      ...call,
      at: call.at_ns / NS_PER_S,
      ended: seconds(call.ended_ns),
      spoken: seconds(call.spoken_ns),
    })),
    turns: told.turns.map(turnOf),
    states: told.states.map(([name, at_ns]) => ({ name, at: at_ns / NS_PER_S })),
    drops: told.drops.map((drop) => ({ ...drop, at: drop.at_ns / NS_PER_S })),
    errors: told.errors.map((error) => ({ ...error, at: error.at_ns / NS_PER_S })),
    said: told.said.map(([voice, begin, end, text, seq]) => ({
      voice,
      begin: begin / NS_PER_S,
      end: end / NS_PER_S,
      text,
      seq,
    })),
    pauses: told.pauses.map(([begin, end]) => ({ begin: begin / NS_PER_S, end: seconds(end) })),
    marks: told.marks.map(([at_ns, kind, seq, fields]) => ({
      at: at_ns / NS_PER_S,
      kind,
      seq,
      fields,
    })),
    talk: told.talk === null ? null : talkOf(told.talk),
    waiting: lineOf(told.waiting),
    queue: lineOf(told.queue),
    kv: lineOf(told.kv),
  };
}

/** The last index whose `at(item)` is not after `time`; -1 before the first. */
export function lastBefore(items, time, at) {
  let low = 0;
  let high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (at(items[middle]) <= time) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** The row with a sequence number, or the first after it; null where there is none. */
export function rowAt(rows, seq) {
  const index = lastBefore(rows, seq - 0.5, (row) => row.seq) + 1;
  return rows[index] ?? null;
}

/** The row with a sequence number, or the last before it; undefined where there is none. */
export function rowBefore(rows, seq) {
  return rows[
    Math.max(
      0,
      lastBefore(rows, seq, (row) => row.seq),
    )
  ];
}
