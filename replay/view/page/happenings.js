/* What happened at single moments: divergences, errors, damage, interruptions, marks, lost input. */

import { many } from "./format.js";
import { authorOf, marksOf, rowBefore } from "./data.js";
import { drawGlyph, faded } from "./paint.js";

/** The colour of each kind's sign. */
export const SIGN_COLOURS = {
  finding: "finding",
  error: "bad",
  damage: "bad",
  interrupt: "warn",
  move: "warn",
  rebuilt: "warn",
  away: "warn",
  back: "warn",
  forked: "warn",
  drop: "warn",
  mark: "user",
};

/** Everything that is shown by a sign, in order of time. */
export function happeningsOf(session) {
  const { story, rows } = session;
  const made = [
    ...story.findings.map((finding) => placed(finding, story, rows)),
    ...story.errors.map(({ at, seq, code, message }) => ({
      kind: "error",
      at,
      seq,
      title: code,
      lines: [message],
    })),
    ...story.marks.map(({ at, seq, kind, fields }) => ({
      kind,
      at,
      seq,
      ...markText(kind, fields),
    })),
    ...marksOf(session)
      .filter(({ seq }) => seq === null)
      .map((mark) => ({
        kind: "mark",
        at: mark.at,
        end: mark.end,
        seq: null,
        title: "Mark",
        lines: [mark.text, [authorOf(mark), "next to the log"].filter(Boolean).join(", ")],
      })),
    ...story.drops.map(({ at, seq, ordinal }) => ({
      kind: "drop",
      at,
      seq,
      title: "Input dropped",
      lines: [`second ${ordinal} of the input, lost to newer input`],
    })),
    ...story.damages.map(([seq, records, reason, detail]) =>
      damageOf(rows, seq, records, reason, detail),
    ),
  ];
  return made.sort((a, b) => a.at - b.at);
}

/* A finding knows its record, unit, turn or time; a unit that this session lacks is at its end. */
function placed({ title, detail, seq, unit, turn, at_ns }, story, rows) {
  const made = { kind: "finding", seq, title, lines: detail };
  if (at_ns !== null) return { ...made, at: at_ns / 1e9 };
  if (seq !== null) return { ...made, at: rowBefore(rows, seq)?.at ?? 0 };
  const known = unit !== null ? story.units : story.turns;
  const run = known.find(({ index }) => index === (unit ?? turn));
  return { ...made, at: run?.started ?? story.duration, seq: run?.seq ?? null };
}

function markText(kind, fields) {
  if (kind === "interrupt")
    return { title: "Interrupted", lines: fields.index === null ? [] : [`unit ${fields.index}`] };
  if (kind === "move") return { title: `Worker ${fields.why}`, lines: ["the session moves to another"] };
  if (kind === "rebuilt")
    return { title: "Rebuilt on another worker", lines: [`${fields.steps} s fed again`] };
  if (kind === "forked")
    return { title: "Forked", lines: ["before this it is a copy; another client goes on"] };
  if (kind === "away") return { title: "Client away", lines: ["the connection is lost"] };
  if (kind === "back") return { title: "Client back", lines: [`it hears frame ${fields.seq} and on`] };
  const lines = Object.entries(fields).map(
    ([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`,
  );
  return { title: "Mark", lines };
}

function damageOf(rows, seq, records, reason, detail) {
  const row = rowBefore(rows, seq ?? 0);
  const title = records ? `Damage: ${many(records, "record")} lost` : "Damage of the log";
  return {
    kind: "damage",
    at: row?.at ?? 0,
    seq: row?.seq ?? null,
    title,
    lines: [`${reason}: ${detail}`],
  };
}

/** The lane that shows them. */
export function marksLane(happenings) {
  return {
    id: "marks",
    label: "Events",
    note: "",
    height: 26,
    draw({ context, scale, theme, top, height }) {
      let last = -Infinity;
      for (const { kind, at, end } of happenings) {
        const x = scale.x(at);
        if (end > at) {
          context.fillStyle = faded(theme.user, 0.25);
          context.fillRect(x, top + height - 6, scale.x(end) - x, 3);
        }
        if (x < -8 || x > scale.width + 8 || (x - last < 1.5 && kind !== "finding")) continue;
        drawGlyph(context, kind, x, top + height / 2, theme[SIGN_COLOURS[kind] ?? "user"]);
        last = x;
      }
    },
    hit(time, reach) {
      const near = happenings.filter(({ at }) => Math.abs(at - time) <= reach * 1.5);
      if (!near.length) return null;
      const best = near.reduce((a, b) => (Math.abs(b.at - time) < Math.abs(a.at - time) ? b : a));
      const more = near.length - 1;
      return { ...best, lines: more ? [...best.lines, `and ${more} more here`] : best.lines };
    },
  };
}
