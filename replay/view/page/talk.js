/* The lane of who spoke when: the user's turns, how long each waited for its answer, where both
 * voices were heard at once, and where the user broke in. All of it is what `antiphon eval` found. */

import { lastBefore } from "./data.js";
import { span } from "./format.js";
import { drawGlyph, faded, fillBox, FONT, hatch, writeFitted } from "./paint.js";

const BAR_PX = 9;
const INSET_PX = 9;
/** From afar the lengths of short delays would stand on each other. */
const DENSITY_MIN = 20;

/** What became of a turn of the user, in a few words. */
export function turnText({ delay, answer, is_silent }) {
  if (delay !== null) return `answered after ${span(delay)}`;
  if (answer !== null) return "answered before it ended";
  return is_silent ? "not answered" : "no answer yet";
}

/** What became of a barge-in. */
export function bargeInText({ begin, end, is_yielded_to }) {
  return is_yielded_to
    ? `the model fell silent after ${span(end - begin)}`
    : `the model spoke on for ${span(end - begin)}`;
}

export function talkLane({ talk }) {
  const { user, model, overlaps, turns, barge_ins } = talk;
  return {
    id: "talk",
    label: "Talk",
    note: "delays, overlaps",
    height: 58,
    draw(g) {
      const { context, scale, theme, top, height } = g;
      for (const { begin, end } of inView(overlaps, scale)) {
        const left = scale.x(begin);
        hatch(context, left, top + 3, scale.x(end) - left, height - 6, faded(theme.warn, 0.7), 3);
      }
      drawBars(g, user, top + INSET_PX, theme.user);
      drawBars(g, model, top + height - INSET_PX - BAR_PX, theme.model);
      for (const turn of inView(turns, scale)) drawDelay(g, turn);
      for (const { begin } of inView(barge_ins, scale))
        drawGlyph(context, "interrupt", scale.x(begin), top + height / 2, theme.warn, 5);
    },
    hit(time, reach) {
      const broke = barge_ins.find(({ begin }) => Math.abs(begin - time) <= 1.5 * reach);
      if (broke) return thing("The user breaks in", bargeInText(broke), broke.begin);
      const both = stretchAt(overlaps, time, reach / 4);
      if (both) return thing("Both voices", `${span(both.end - both.begin)}`, both.begin);
      const turn = stretchAt(turns, time, reach / 4);
      if (turn)
        return thing(
          "The user’s turn",
          `${span(turn.end - turn.begin)}, ${turnText(turn)}`,
          turn.begin,
        );
      const spoke = stretchAt(model, time, reach / 4);
      return spoke ? thing("The model is heard", span(spoke.end - spoke.begin), spoke.begin) : null;
    },
  };
}

function thing(title, line, begin) {
  return { title, lines: [line], at: begin, seq: null };
}

/** The last of some stretches that a time is in; `reach` seconds more count. */
function stretchAt(stretches, time, reach) {
  const index = lastBefore(stretches, time + reach, ({ begin }) => begin);
  return index >= 0 && time <= stretches[index].end + reach ? stretches[index] : null;
}

function* inView(stretches, scale) {
  const first = lastBefore(stretches, scale.begin, ({ begin }) => begin);
  for (let i = Math.max(0, first); i < stretches.length && stretches[i].begin <= scale.end; i++)
    yield stretches[i];
}

function drawBars({ context, scale }, stretches, y, colour) {
  for (const { begin, end } of inView(stretches, scale)) {
    const left = Math.max(scale.x(begin), -8);
    fillBox(context, left, y, Math.min(scale.x(end), scale.width + 8) - left, BAR_PX, colour, 4);
  }
}

/* From the end of what the user said to the answer: a line with its length. */
function drawDelay({ context, scale, theme, top, height }, { end, answer, delay, is_silent }) {
  const middle = Math.round(top + height / 2);
  const left = scale.x(end);
  if (is_silent) {
    context.fillStyle = theme.bad;
    context.font = FONT;
    writeFitted(context, "no answer", left + 4, middle, 4 * scale.density - 6);
    return;
  }
  if (delay === null) return;
  const right = scale.x(answer);
  context.fillStyle = theme.soft;
  context.fillRect(left, middle - 6, 1, 12);
  context.fillRect(right - 1, middle - 6, 1, 12);
  context.fillRect(left, middle - 0.5, right - left, 1);
  const words = span(delay);
  context.font = FONT;
  const wide = context.measureText(words).width;
  const fits = wide + 10 <= right - left;
  if (!fits && scale.density < DENSITY_MIN) return;
  const from = fits ? (left + right - wide) / 2 : right + 5;
  context.fillStyle = theme.card;
  context.fillRect(from - 3, middle - 7, wide + 6, 14);
  context.fillStyle = theme.ink;
  context.fillText(words, from, middle + 0.5);
}
