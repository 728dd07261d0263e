/* The lanes of the time line. Each draws what of it is in view, and says what is at a place.
 *
 * A lane is `{id, label, note, height, draw(g), hit(time, reach, y)}`: `g` has the canvas, the
 * scale, the colours, and the lane's `top` and `height`; `hit` answers what is there, for the
 * pointer, or null: `{title, lines, at, seq, unit}`. `reach` is how far from `time` still counts, in
 * seconds. A lane that has to be drawn again by itself calls its `changed`.
 */

import { clock, count, many, span } from "./format.js";
import { lastBefore } from "./data.js";
import {
  drawGlyph,
  drawSteps,
  faded,
  fillBox,
  FONT,
  FONT_BOLD,
  hatch,
  writeFitted,
} from "./paint.js";
import { marksLane } from "./happenings.js";
import { talkLane } from "./talk.js";
import { turnsLane, unitsLane } from "./units.js";
import { picturesLane, waveLane, wordsLane } from "./voices.js";

/** The lanes that a session has, from top to bottom. */
export function lanesOf(session) {
  const { story, sounds, pictures, happenings, later } = session;
  return [
    happenings.length || later.writes ? marksLane(happenings) : null,
    waveLane("user", "User", sounds.user),
    pictures.length ? picturesLane(session) : null,
    waveLane("model", "Model", sounds.model),
    story.talk ? talkLane(story) : null,
    wordsLane(story.said),
    statesLane(session),
    story.turns.length ? turnsLane(story) : null,
    story.units.length ? unitsLane(story) : null,
    queueLane(session),
    story.kv.length ? kvLane(session) : null,
  ].filter((lane) => lane !== null);
}

// -- states --------------------------------------------------------------------------------------

const STATE_COLOURS = { QUEUED: "warn", CONNECTED: "user", ACTIVE: "good", CLOSED: "soft" };

function statesLane({ story, rows }) {
  const { states } = story;
  const lost =
    story.diverged_seq === null
      ? null
      : rows[lastBefore(rows, story.diverged_seq, (row) => row.seq)]?.at;
  const until = lost ?? story.duration;
  const spans = states.map(({ name, at }, i) => ({
    name,
    begin: at,
    end: states[i + 1]?.at ?? until,
  }));
  const pauses = story.pauses.map(({ begin, end }) => ({
    name: "paused",
    begin,
    end: end ?? story.duration,
  }));
  return {
    id: "state",
    label: "State",
    note: "",
    height: 30,
    draw({ context, scale, theme, top, height }) {
      context.font = FONT_BOLD;
      for (const { name, begin, end } of spans) {
        const colour = theme[STATE_COLOURS[name] ?? "soft"];
        drawState(context, scale, name.toLowerCase(), begin, end, top + 5, height - 10, colour);
      }
      for (const { name, begin, end } of pauses) {
        const left = scale.x(begin);
        hatch(context, left, top + 5, scale.x(end) - left, height - 10, faded(theme.soft, 0.5), 4);
        context.fillStyle = theme.ink;
        writeFitted(
          context,
          name,
          Math.max(left, 0) + 7,
          top + height / 2,
          scale.x(end) - left - 12,
        );
      }
      if (lost === null) return;
      drawState(
        context,
        scale,
        "unknown: the replay parted",
        lost,
        story.duration,
        top + 5,
        height - 10,
        theme.finding,
      );
    },
    hit(time) {
      const found = [...pauses, ...spans].find(({ begin, end }) => time >= begin && time <= end);
      if (!found) return null;
      return {
        title: found.name,
        lines: [
          `${clock(found.begin, 3)} to ${clock(found.end, 3)}, ${span(found.end - found.begin)}`,
        ],
        at: found.begin,
        seq: null,
      };
    },
  };
}

function drawState(context, scale, name, begin, end, y, height, colour) {
  const left = scale.x(begin);
  const width = Math.max(2, scale.x(end) - left - 1);
  if (left > scale.width || left + width < 0) return;
  const from = Math.max(left, -4);
  fillBox(
    context,
    from,
    y,
    Math.min(left + width, scale.width + 4) - from,
    height,
    faded(colour, 0.2),
    4,
  );
  context.fillStyle = colour;
  writeFitted(
    context,
    name,
    Math.max(from, 0) + 7,
    y + height / 2 + 0.5,
    left + width - Math.max(from, 0) - 12,
  );
}

// -- the queue -----------------------------------------------------------------------------------

function queueLane({ story }) {
  const { queue, waiting, drops } = story;
  const most = Math.max(
    2,
    ...queue.map(([, place]) => place),
    ...waiting.map(([, units]) => units),
  );
  return {
    id: "queue",
    label: "Queue",
    note: most > 2 ? `${most} at most` : "",
    height: 44,
    draw({ context, scale, theme, top, height }) {
      const base = top + height - 6;
      const yOf = (value) => base - (value / most) * (height - 14);
      context.fillStyle = theme.line;
      context.fillRect(0, base, scale.width, 1);
      drawStairs(context, queue, scale, yOf, base, theme.warn, story.duration);
      drawStairs(context, waiting, scale, yOf, base, theme.user, story.duration);
      for (const { at } of drops) {
        const x = scale.x(at);
        if (x > -6 && x < scale.width + 6) drawGlyph(context, "drop", x, top + 8, theme.bad, 4);
      }
    },
    hit(time, reach) {
      const dropped = drops.filter(({ at }) => Math.abs(at - time) <= reach);
      if (dropped.length)
        return {
          title: "Input dropped",
          lines: [`${many(dropped.length, "second")}, lost to newer input`],
          at: dropped[0].at,
          seq: dropped[0].seq,
        };
      const place = queue[lastBefore(queue, time, (point) => point[0])];
      if (place && place[1] > 0)
        return {
          title: `Place ${place[1]} of ${place[2]} in the queue`,
          lines: [],
          at: place[0],
          seq: null,
        };
      const units = waiting[lastBefore(waiting, time, (point) => point[0])];
      if (units && units[1] > 0)
        return {
          title: `${many(units[1], "second")} of input waiting`,
          lines: [],
          at: units[0],
          seq: null,
        };
      return null;
    },
  };
}

/* A stair for each stretch of a line above zero; one that lasts no time is not drawn. */
function drawStairs(context, points, scale, yOf, base, colour, until) {
  for (
    let i = Math.max(
      0,
      lastBefore(points, scale.begin, (point) => point[0]),
    );
    i < points.length;
    i++
  ) {
    const [begin, value] = points[i];
    const end = i + 1 < points.length ? points[i + 1][0] : until;
    if (begin > scale.end) break;
    if (value === 0 || end <= begin) continue;
    const left = scale.x(begin);
    const width = Math.max(1, scale.x(end) - left);
    context.fillStyle = faded(colour, 0.28);
    context.fillRect(left, yOf(value), width, base - yOf(value));
    context.fillStyle = colour;
    context.fillRect(left, yOf(value), width, 1.5);
  }
}

// -- the KV cache --------------------------------------------------------------------------------

function kvLane({ story }) {
  const { kv, context_tokens: limit } = story;
  const highest = Math.max(1, ...kv.map(([, tokens]) => tokens));
  const isNear = limit !== null && highest > limit / 4;
  const most = isNear ? Math.max(limit, highest) : highest * 1.2;
  return {
    id: "kv",
    label: "KV cache",
    note: `${count(highest)}${limit === null ? " tokens" : ` / ${count(limit)}`}`,
    height: 52,
    draw({ context, scale, theme, top, height }) {
      const base = top + height - 6;
      const yOf = (value) => base - (value / most) * (height - 16);
      context.fillStyle = theme.line;
      context.fillRect(0, base, scale.width, 1);
      if (isNear) {
        context.strokeStyle = theme.bad;
        context.lineWidth = 1;
        context.setLineDash([4, 4]);
        context.beginPath();
        context.moveTo(0, Math.round(yOf(limit)) + 0.5);
        context.lineTo(scale.width, Math.round(yOf(limit)) + 0.5);
        context.stroke();
        context.setLineDash([]);
      }
      drawSteps(context, kv, scale, yOf, {
        stroke: theme.model,
        fill: faded(theme.model, 0.14),
        base,
        until: story.duration,
      });
    },
    hit(time) {
      const point = kv[lastBefore(kv, time, (each) => each[0])];
      if (!point) return null;
      const share =
        limit === null ? [] : [`${((100 * point[1]) / limit).toFixed(1)} % of ${count(limit)}`];
      return { title: many(point[1], "token"), lines: share, at: point[0], seq: null };
    },
  };
}
