/* A voice as a shape: the lowest and highest sample of each pixel's time, from whichever level of
 * detail has just enough of them, so that ten minutes cost no more to draw than ten seconds. */

import { bytesOf, lastBefore } from "./data.js";

export const PEAKS_A_SECOND = 200;
const FACTOR = 4;
const LEVELS = 6;

/** The levels of a piece of sound, made when it is first drawn: each a quarter of the last. */
function levelsOf(piece) {
  if (piece.levels === null) {
    const bytes = bytesOf(piece.peaks);
    piece.peaks = null;
    piece.levels = [new Int8Array(bytes.buffer)];
    for (let i = 1; i < LEVELS; i++) piece.levels.push(coarser(piece.levels[i - 1]));
  }
  return piece.levels;
}

function coarser(pairs) {
  const length = Math.ceil(pairs.length / 2 / FACTOR);
  const made = new Int8Array(2 * length);
  for (let i = 0; i < length; i++) {
    let low = 127;
    let high = -128;
    const end = Math.min(pairs.length, 2 * FACTOR * (i + 1));
    for (let j = 2 * FACTOR * i; j < end; j += 2) {
      if (pairs[j] < low) low = pairs[j];
      if (pairs[j + 1] > high) high = pairs[j + 1];
    }
    made[2 * i] = low;
    made[2 * i + 1] = high;
  }
  return made;
}

/** The loudest sample of some pieces, as a share of the most there can be; at least a tenth. */
export function loudest(pieces) {
  let most = 12;
  for (const piece of pieces) {
    for (const value of levelsOf(piece).at(-1)) most = Math.max(most, Math.abs(value));
  }
  return most / 127;
}

/** Draw the pieces in view around the line `middle`, `half` pixels up and down for the loudest. */
export function drawWave(context, pieces, scale, { middle, half, colour, gain }) {
  context.fillStyle = colour;
  const start = Math.max(
    0,
    lastBefore(pieces, scale.begin, (piece) => piece.begin),
  );
  for (let i = start; i < pieces.length && pieces[i].begin <= scale.end; i++) {
    drawPiece(context, pieces[i], scale, middle, half * gain);
  }
}

/* Columns stand at multiples of their time, so that a shape does not flicker when it moves, and on
 * whole pixels, which are quick to fill. Columns of the same height are one box. */
function drawPiece(context, piece, scale, middle, half) {
  const column = 1 / scale.density;
  const first = Math.floor(Math.max(piece.begin, scale.begin) / column);
  const last = Math.floor(Math.min(piece.end, scale.end) / column);
  if (last < first) return;
  const levels = levelsOf(piece);
  const fitting = Math.floor(Math.log(column * PEAKS_A_SECOND) / Math.log(FACTOR));
  const level = Math.min(LEVELS - 1, Math.max(0, fitting));
  const pairs = levels[level];
  const rate = PEAKS_A_SECOND / FACTOR ** level;
  const length = pairs.length / 2;
  const left = Math.round(scale.x(first * column));
  let [begun, lowBefore, highBefore] = [first, 0, 0];
  const fill = (end) => {
    const top = middle - Math.max((highBefore / 127) * half, 0.5);
    const bottom = middle - Math.min((lowBefore / 127) * half, -0.5);
    context.fillRect(left + begun - first, top, end - begun, bottom - top);
  };
  for (let k = first; k <= last; k++) {
    const from = (k * column - piece.begin) * rate;
    const low = Math.max(0, Math.min(length - 1, Math.floor(from)));
    const high = Math.max(low + 1, Math.min(length, Math.ceil(from + column * rate)));
    let lowest = 127;
    let highest = -128;
    for (let i = low; i < high; i++) {
      if (pairs[2 * i] < lowest) lowest = pairs[2 * i];
      if (pairs[2 * i + 1] > highest) highest = pairs[2 * i + 1];
    }
    if (k > first && (lowest !== lowBefore || highest !== highBefore)) {
      fill(k);
      begun = k;
    }
    [lowBefore, highBefore] = [lowest, highest];
  }
  fill(last + 1);
}
