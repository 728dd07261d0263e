/* The lanes of what the model did: units of a duplex session and its calls, turns of a chat.
 *
 * Close by, a unit is a bar: prefill, generate, finalize. Beneath it are the time that its input
 * waited for the barrier, and the second that it had, with what went beyond it. From afar it is a
 * column as high as all of that took.
 */

import { many, span } from "./format.js";
import { lastBefore } from "./data.js";
import { drawGlyph, faded, fillBox, FONT, writeFitted } from "./paint.js";

/** A unit is to be ready when the next second of input is: it has as long as it lasts. */
export const DEADLINE_S = 1;
const BAR_DENSITY_MIN = 16;
/** The height in which calls are drawn, above the units. */
const CALLS_PX = 8;
const OUTCOME_COLOURS = {
  listen: "user",
  speech: "model",
  withheld: "warn",
  failed: "bad",
  context_full: "bad",
  ended: "soft",
  pending: "soft",
};

/** When the unit is due. */
export function deadlineOf(unit) {
  return (unit.arrived ?? unit.started) + DEADLINE_S;
}

/** How long its stages took, in seconds: `[name, seconds]`, only those that are known. */
export function stagesOf(unit) {
  const stages = [];
  const { costs, started, done, finalized, arrived, undone } = unit;
  if (arrived !== null && started > arrived) stages.push(["barrier wait", started - arrived]);
  if (done !== null) {
    const prefill = Math.min(done - started, (costs?.prefill_us ?? 0) / 1e6);
    if (prefill > 0) stages.push(["prefill", prefill]);
    stages.push(["generate", done - started - prefill]);
  }
  if (done !== null && finalized !== null) stages.push(["finalize", finalized - done]);
  if (done !== null && undone !== null) stages.push(["rollback", undone - done]);
  return stages;
}

/** Why the model listened or spoke, as far as the log says; null where it does not. */
export function whyOf({ outcome, forced, isFirst, margin, isNearTie }) {
  if (!["listen", "speech", "withheld"].includes(outcome)) return null;
  if (forced) return "it had to listen: its client, or speech that was found, asked for it";
  if (isFirst) return "it had to listen, as in the first seconds of each session";
  if (!margin) return null;
  const won = outcome === "listen" ? "listening" : "speaking";
  const logits = `${won} won by ${margin.toFixed(2)} logits`;
  return isNearTie ? `${logits}: nearly the other way` : logits;
}

/** A unit in lines, for people. */
export function unitLines(unit) {
  const why = whyOf(unit);
  const lines = stagesOf(unit).map(([name, seconds]) => `${name} ${span(seconds)}`);
  if (unit.done !== null) {
    const left = deadlineOf(unit) - unit.done;
    lines.push(
      left >= 0 ? `${span(left)} before its deadline` : `${span(-left)} after its deadline`,
    );
  }
  if (why) lines.push(why);
  if (unit.cut) lines.push(`cut at ${unit.cut.stage}, step ${unit.cut.step}`);
  if (unit.kv_length !== null) lines.push(many(unit.kv_length, "token"));
  if (unit.text) lines.push(`“${unit.text.trim()}”`);
  return lines;
}

/** What became of a unit, in a word or two. */
export function outcomeOf(unit) {
  const words = [unit.outcome.replace("_", " ")];
  if (unit.forced) words.push("forced");
  if (unit.end_of_turn) words.push("end of turn");
  return words.join(", ");
}

/** A call of a tool in lines, for people. */
export function callLines({ arguments: given, result, at, ended, spoken }) {
  if (ended === null) return [given, "no result"];
  const lines = [given, `“${result}” after ${span(ended - at)}`];
  return spoken === null ? lines : [...lines, `speech ${span(spoken - ended)} later`];
}

/* Calls are lines above the units, from the call to its result. */
function drawCalls({ context, scale, theme, top }, calls, duration) {
  for (const { at, ended, is_answered } of calls) {
    if (!scale.sees(at, ended ?? duration)) continue;
    const colour = theme[is_answered ? "good" : "bad"];
    const left = scale.x(at);
    fillBox(context, left, top + 2, scale.x(ended ?? duration) - left, 3, faded(colour, 0.6), 1);
    fillBox(context, left, top, 3, 7, colour, 1);
  }
}

export function unitsLane({ units, calls, duration }) {
  const startOf = (unit) => unit.arrived ?? unit.started;
  return {
    id: "units",
    label: "Units",
    note: "due within 1 s",
    height: 54,
    draw(g) {
      const { scale } = g;
      const start = Math.max(0, lastBefore(units, scale.begin - 12, startOf));
      const paint = scale.density >= BAR_DENSITY_MIN ? drawBar : drawColumn;
      for (let i = start; i < units.length && startOf(units[i]) <= scale.end; i++)
        paint(g, units[i]);
      if (paint === drawColumn) drawLimit(g);
      drawCalls(g, calls, duration);
    },
    /* What runs goes before what waits, or has time left. */
    hit(time, reach, y) {
      const isOver = ({ at, ended }) => time >= at - reach / 2 && time <= (ended ?? duration) + reach / 2;
      const call = y < CALLS_PX ? calls.findLast(isOver) : undefined;
      if (call) return { title: `Calls ${call.name || "no tool"}`, lines: callLines(call), at: call.at, seq: null };
      const last = lastBefore(units, time + reach / 4, startOf);
      const near = units.slice(Math.max(0, last - 8), last + 1).reverse();
      const endOf = (unit) => Math.max(unit.finalized ?? 0, unit.done ?? 0);
      const runs = (unit) => time >= unit.started - reach / 4 && time <= endOf(unit) + reach / 4;
      const unit =
        near.find(runs) ?? near.find((each) => time <= Math.max(endOf(each), deadlineOf(each)));
      if (!unit) return null;
      const title = `Unit ${unit.index}: ${outcomeOf(unit)}`;
      return { title, lines: unitLines(unit), at: unit.started, seq: unit.seq ?? null, unit };
    },
  };
}

function drawBar({ context, scale, theme, top, height }, unit) {
  const colour = theme[OUTCOME_COLOURS[unit.outcome] ?? "soft"];
  const y = top + 8;
  const tall = height - 24;
  const done = unit.done ?? unit.started + 0.02;
  const stage = (begin, end, shade, radius = 2) => {
    const left = scale.x(begin);
    fillBox(context, left, y, scale.x(end) - left, tall, faded(colour, shade), radius);
  };
  if (unit.arrived !== null && unit.started - unit.arrived > 0.0005) {
    const left = scale.x(unit.arrived);
    fillBox(
      context,
      left,
      y + tall + 2,
      scale.x(unit.started) - left,
      3,
      faded(theme.soft, 0.7),
      1,
    );
  }
  const prefilled = Math.min(done, unit.started + (unit.costs?.prefill_us ?? 0) / 1e6);
  stage(unit.started, prefilled, 0.35);
  stage(prefilled, done, unit.outcome === "withheld" ? 0.45 : 0.9);
  if (unit.finalized !== null) stage(done, unit.finalized, 0.2);
  if (unit.undone !== null) stage(done, unit.undone, 0.2);
  if (unit.cut) drawGlyph(context, "interrupt", scale.x(done), y + tall / 2, theme.ink, 5);
  drawDeadline(context, scale, theme, unit, top + height - 9);
  const width = scale.x(done) - scale.x(prefilled);
  if (width < 20) return;
  context.fillStyle = unit.outcome === "withheld" ? theme.ink : theme.card;
  context.font = FONT;
  const from = Math.max(0, scale.x(prefilled)) + 6;
  const room = scale.x(done) - from - 5;
  const words = `${unit.index}  ${outcomeOf(unit)}`;
  const fits = context.measureText(words).width <= room;
  writeFitted(context, fits ? words : String(unit.index), from, y + tall / 2 + 0.5, room);
}

function drawDeadline(context, scale, theme, unit, y) {
  const begin = unit.arrived ?? unit.started;
  const due = deadlineOf(unit);
  const left = scale.x(begin);
  context.fillStyle = theme.line;
  context.fillRect(left, y, scale.x(due) - left - 2, 2);
  context.fillStyle = theme.faint;
  context.fillRect(scale.x(due) - 2, y - 2, 1, 6);
  const late = (unit.finalized ?? unit.done ?? 0) - due;
  if (late > 0)
    fillBox(context, scale.x(due), y - 1, scale.x(due + late) - scale.x(due), 4, theme.bad, 2);
}

function drawColumn({ context, scale, theme, top, height }, unit) {
  const most = height - 14;
  const took =
    ((unit.finalized ?? unit.done ?? unit.started) - (unit.arrived ?? unit.started)) / DEADLINE_S;
  const isLate = took > 1;
  const tall = Math.max(3, Math.min(1.3, took) * (most / 1.3));
  const colour = theme[isLate ? "bad" : (OUTCOME_COLOURS[unit.outcome] ?? "soft")];
  const width = Math.max(1, scale.density * DEADLINE_S - (scale.density > 3 ? 1 : 0));
  const shade = unit.outcome === "listen" && !isLate ? 0.45 : 0.9;
  context.fillStyle = faded(colour, shade);
  context.fillRect(scale.x(unit.arrived ?? unit.started), top + height - 7 - tall, width, tall);
}

function drawLimit({ context, scale, theme, top, height }) {
  const y = Math.round(top + height - 7 - (height - 14) / 1.3) + 0.5;
  context.strokeStyle = theme.faint;
  context.lineWidth = 1;
  context.setLineDash([2, 4]);
  context.beginPath();
  context.moveTo(0, y);
  context.lineTo(scale.width, y);
  context.stroke();
  context.setLineDash([]);
}

// -- turns of chat -------------------------------------------------------------------------------

/** A turn in lines, for people. */
export function turnLines(turn) {
  const lines = [];
  if (turn.prefilled !== null)
    lines.push(
      `prefill ${span(turn.prefilled - turn.started)}, ${many(turn.input_tokens ?? 0, "token")}`,
    );
  if (turn.done !== null)
    lines.push(
      `answer ${span(turn.done - (turn.prefilled ?? turn.started))}`,
      many(turn.generated_tokens, "token"),
    );
  if (turn.audio_ms) lines.push(`${span(turn.audio_ms / 1000)} of speech`);
  if (turn.text) lines.push(`“${turn.text.trim()}”`);
  for (const call of turn.calls) lines.push(`calls ${call.name} ${call.arguments}`);
  return lines;
}

export function turnsLane({ turns, duration }) {
  const endOf = (turn) => turn.done ?? duration;
  return {
    id: "turns",
    label: "Turns",
    note: "",
    height: 44,
    draw({ context, scale, theme, top, height }) {
      for (const turn of turns) {
        if (!scale.sees(turn.started, endOf(turn))) continue;
        const colour =
          theme[
            ["failed", "context_full"].includes(turn.outcome)
              ? "bad"
              : turn.outcome === "interrupted"
                ? "warn"
                : "model"
          ];
        const left = scale.x(turn.started);
        const middle = scale.x(turn.prefilled ?? turn.started);
        const right = scale.x(endOf(turn));
        fillBox(context, left, top + 8, middle - left, height - 16, faded(colour, 0.35), 3);
        fillBox(context, middle, top + 8, right - middle, height - 16, faded(colour, 0.9), 3);
        context.fillStyle = theme.card;
        context.font = FONT;
        writeFitted(
          context,
          `${turn.index}  ${turn.outcome.replace("_", " ")}`,
          Math.max(0, middle) + 7,
          top + height / 2 + 0.5,
          right - Math.max(0, middle) - 12,
        );
      }
    },
    hit(time, reach) {
      const found = turns.find(
        (turn) => time >= turn.started - reach / 2 && time <= endOf(turn) + reach / 2,
      );
      if (!found) return null;
      const title = `Turn ${found.index}: ${found.outcome.replace("_", " ")}`;
      return { title, lines: turnLines(found), at: found.started, seq: null, turn: found };
    },
  };
}
