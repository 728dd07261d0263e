/* What the lanes are painted with: colours of the style sheet, shapes, text that fits. */

const NAMES = [
  "paper",
  "card",
  "ink",
  "soft",
  "faint",
  "line",
  "user",
  "model",
  "warn",
  "bad",
  "finding",
  "good",
];
export const FONT = "11px system-ui, -apple-system, 'Segoe UI', sans-serif";
export const FONT_BOLD = `600 ${FONT}`;

/** The colours in use, by name, light or dark as the style sheet has them now. */
export function readTheme(root) {
  const style = getComputedStyle(root);
  return Object.fromEntries(
    NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]),
  );
}

/** A colour that lets `share` of itself through. */
export function faded(colour, share) {
  const hex = Math.round(share * 255)
    .toString(16)
    .padStart(2, "0");
  return colour + hex;
}

export function box(context, x, y, width, height, radius = 3) {
  context.beginPath();
  context.roundRect(x, y, Math.max(width, 1), height, Math.min(radius, Math.max(width, 1) / 2));
}

export function fillBox(context, x, y, width, height, colour, radius = 3) {
  context.fillStyle = colour;
  box(context, x, y, width, height, radius);
  context.fill();
}

/** Slanted lines over a box, for what was waited for or taken back. */
export function hatch(context, x, y, width, height, colour, radius = 3) {
  context.save();
  box(context, x, y, width, height, radius);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height - ((x - height) % 5); at < x + width; at += 5) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

const widths = new Map();
const WIDTHS_MAX = 5000;

function widthOf(context, text) {
  const key = `${context.font} ${text}`;
  let width = widths.get(key);
  if (width === undefined) {
    if (widths.size > WIDTHS_MAX) widths.clear();
    width = context.measureText(text).width;
    widths.set(key, width);
  }
  return width;
}

/** Write as much of a text as fits; nothing where not even its start does. */
export function writeFitted(context, text, x, y, width) {
  if (width < 12 || !text) return;
  if (widthOf(context, text) <= width) {
    context.fillText(text, x, y);
    return;
  }
  let low = 0;
  let high = Math.min(text.length, Math.ceil(width / 3));
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (widthOf(context, `${text.slice(0, middle)}…`) <= width) low = middle;
    else high = middle - 1;
  }
  if (low > 0) context.fillText(`${text.slice(0, low).trimEnd()}…`, x, y);
}

/** A line of steps: each point holds until the next. */
export function drawSteps(context, points, scale, yOf, { stroke, fill, base, until }) {
  const shown = [];
  for (let i = 0; i < points.length; i++) {
    const next = i + 1 < points.length ? points[i + 1][0] : until;
    if (next >= scale.begin && points[i][0] <= scale.end)
      shown.push([points[i][0], next, points[i][1]]);
  }
  if (!shown.length) return;
  const path = new Path2D();
  path.moveTo(scale.x(shown[0][0]), yOf(shown[0][2]));
  for (const [begin, end, value] of shown) {
    path.lineTo(scale.x(begin), yOf(value));
    path.lineTo(scale.x(end), yOf(value));
  }
  if (fill) {
    const area = new Path2D(path);
    area.lineTo(scale.x(shown.at(-1)[1]), base);
    area.lineTo(scale.x(shown[0][0]), base);
    context.fillStyle = fill;
    context.fill(area);
  }
  context.strokeStyle = stroke;
  context.lineWidth = 1.25;
  context.stroke(path);
}

const corner = (context, x, y, r) =>
  polygon(context, [
    [x - r, y],
    [x + r, y - Math.abs(r)],
    [x + r, y + Math.abs(r)],
  ]);

const GLYPHS = {
  error: (context, x, y, r) => cross(context, x, y, r),
  drop: (context, x, y, r) =>
    polygon(context, [
      [x - r, y - r * 0.7],
      [x + r, y - r * 0.7],
      [x, y + r],
    ]),
  mark: (context, x, y, r) =>
    polygon(context, [
      [x - r * 0.8, y - r],
      [x + r, y - r * 0.2],
      [x - r * 0.8, y + r * 0.6],
    ]),
  interrupt: (context, x, y, r) => bars(context, x, y, r),
  move: (context, x, y, r) => corner(context, x, y, r),
  rebuilt: (context, x, y, r) => corner(context, x, y, -r),
  away: (context, x, y, r) => corner(context, x, y, r),
  back: (context, x, y, r) => corner(context, x, y, -r),
  forked: (context, x, y, r) => corner(context, x, y, -r),
  finding: (context, x, y, r) =>
    polygon(context, [
      [x, y - r * 1.1],
      [x + r, y],
      [x, y + r * 1.1],
      [x - r, y],
    ]),
  damage: (context, x, y, r) => cross(context, x, y, r),
};

function polygon(context, points) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.closePath();
  context.fill();
}

function cross(context, x, y, r) {
  context.lineWidth = 2;
  context.beginPath();
  context.moveTo(x - r * 0.75, y - r * 0.75);
  context.lineTo(x + r * 0.75, y + r * 0.75);
  context.moveTo(x + r * 0.75, y - r * 0.75);
  context.lineTo(x - r * 0.75, y + r * 0.75);
  context.stroke();
}

function bars(context, x, y, r) {
  context.fillRect(x - r * 0.7, y - r * 0.8, r * 0.5, r * 1.6);
  context.fillRect(x + r * 0.2, y - r * 0.8, r * 0.5, r * 1.6);
}

/** A small sign for one kind of happening. */
export function drawGlyph(context, kind, x, y, colour, radius = 5) {
  context.fillStyle = colour;
  context.strokeStyle = colour;
  (GLYPHS[kind] ?? GLYPHS.mark)(context, x, y, radius);
}
