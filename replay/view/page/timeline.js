/* The time line: the overview of the whole session, the ruler, the lanes, and the pointer on them.
 *
 * It draws once a frame, when something has changed, and only what is in view.
 */

import { clock } from "./format.js";
import { Scale } from "./scale.js";
import { drawWave, loudest } from "./waveform.js";
import { drawGlyph, faded, fillBox, FONT, readTheme } from "./paint.js";
import { SIGN_COLOURS } from "./happenings.js";

const RULER_PX = 26;
const CLICK_PX = 4;
const REACH_PX = 7;

export class TimeLine {
  /** `on` is told: `seek(time)`, `choose(thing, time)`, `looked()` when the view was moved, and
   * `marked(range)` when a part was selected. */
  constructor(page, session, lanes, player, on) {
    this.session = session;
    this.lanes = lanes;
    this.player = player;
    this.on = on;
    this.scale = new Scale(session.end);
    this.happenings = session.happenings;
    this.canvas = page.querySelector("#lanes");
    this.overview = page.querySelector("#overview");
    this.tip = page.querySelector("#tip");
    this.selected = null;
    this.range = null;
    this.pointer = null;
    this.pointers = new Map();
    this.frames = [];
    this.due = false;
    this.overviewLayer = null;
    this.layOut(page.querySelector("#labels"));
    this.listen();
    this.restyle();
  }

  // -- layout ------------------------------------------------------------------------------------

  layOut(labels) {
    let top = RULER_PX;
    for (const lane of this.lanes) {
      lane.top = top;
      const label = document.createElement("div");
      label.className = `label lane-${lane.id}`;
      label.style.top = `${top}px`;
      label.style.height = `${lane.height}px`;
      label.append(lane.voice ? this.voiceButton(lane) : span_("name", lane.label));
      if (lane.note) label.append(span_("note", lane.note));
      labels.append(label);
      lane.changed = () => this.draw();
      top += lane.height;
    }
    this.height = top;
    this.canvas.style.height = `${top}px`;
  }

  /* The label of a voice turns it off and on. */
  voiceButton(lane) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = `voice voice-${lane.voice}`;
    button.textContent = lane.label;
    button.title = `Hear the ${lane.label.toLowerCase()}, or not`;
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const isMuted = !this.player.muted[lane.voice];
      this.player.mute(lane.voice, isMuted);
      button.setAttribute("aria-pressed", String(!isMuted));
    });
    return button;
  }

  restyle() {
    this.theme = readTheme(document.documentElement);
    this.overviewLayer = null;
    this.resize();
  }

  resize() {
    const density = window.devicePixelRatio || 1;
    for (const canvas of [this.canvas, this.overview]) {
      const { clientWidth, clientHeight } = canvas;
      canvas.width = Math.round(clientWidth * density);
      canvas.height = Math.round(clientHeight * density);
      canvas.getContext("2d").setTransform(density, 0, 0, density, 0, 0);
    }
    this.scale.width = Math.max(1, this.canvas.clientWidth);
    this.overviewLayer = null;
    this.draw();
  }

  // -- drawing -----------------------------------------------------------------------------------

  /** Draw with the next frame. */
  draw() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => {
      this.due = false;
      this.drawNow();
    });
  }

  drawNow() {
    const began = performance.now();
    this.drawLanes();
    this.drawOverview();
    this.frames.push(performance.now() - began);
    if (this.frames.length > 600) this.frames.shift();
  }

  drawLanes() {
    const context = this.canvas.getContext("2d");
    const { scale, theme, lanes } = this;
    context.clearRect(0, 0, scale.width, this.height);
    context.textBaseline = "middle";
    this.drawRuler(context);
    for (const lane of lanes) {
      context.fillStyle = theme.line;
      context.fillRect(0, lane.top, scale.width, 1);
      context.save();
      context.beginPath();
      context.rect(0, lane.top, scale.width, lane.height);
      context.clip();
      lane.draw({ context, scale, theme, top: lane.top, height: lane.height });
      context.restore();
    }
    if (this.range) this.drawRange(context);
    for (const finding of this.happenings) {
      if (finding.kind === "finding")
        this.drawLine(context, finding.at, theme.finding, 1.5, RULER_PX);
    }
    if (this.selected)
      this.drawLine(context, this.selected.at, faded(theme.ink, 0.35), 1, RULER_PX);
    if (this.pointer)
      this.drawLine(context, scale.time(this.pointer.x), faded(theme.ink, 0.18), 1, 0);
    this.drawHead(context);
  }

  drawRuler(context) {
    const { scale, theme } = this;
    const { times, digits } = scale.ticks();
    context.font = FONT;
    for (const time of times) {
      const x = Math.round(scale.x(time));
      context.fillStyle = faded(theme.line, 0.7);
      context.fillRect(x, RULER_PX, 1, this.height);
      context.fillStyle = theme.faint;
      context.fillRect(x, RULER_PX - 6, 1, 6);
      context.fillStyle = theme.soft;
      context.fillText(clock(time, digits), x + 5, RULER_PX / 2);
    }
  }

  drawLine(context, time, colour, width, top) {
    const x = this.scale.x(time);
    if (x < -2 || x > this.scale.width + 2) return;
    context.fillStyle = colour;
    context.fillRect(x - width / 2, top, width, this.height - top);
  }

  drawRange(context) {
    const { scale, theme, range } = this;
    const left = scale.x(range.begin);
    const right = scale.x(range.end);
    context.fillStyle = faded(theme.user, 0.13);
    context.fillRect(left, 0, right - left, this.height);
    this.drawLine(context, range.begin, theme.user, 1.5, 0);
    this.drawLine(context, range.end, theme.user, 1.5, 0);
  }

  drawHead(context) {
    const { theme, scale } = this;
    const time = this.player.position;
    this.drawLine(context, time, theme.ink, 1.5, 4);
    const x = scale.x(time);
    if (x > -8 && x < scale.width + 8) fillBox(context, x - 5, 2, 10, 10, theme.ink, 5);
  }

  drawOverview() {
    const canvas = this.overview;
    const context = canvas.getContext("2d");
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width || !height || !canvas.width || !canvas.height) return; // Not laid out, or not yet again.
    const { theme, scale } = this;
    this.overviewLayer ??= this.makeOverview(canvas, width, height);
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(this.overviewLayer, 0, 0);
    context.restore();
    const whole = this.wholeScale(width);
    const left = whole.x(scale.begin);
    const right = whole.x(scale.end);
    context.fillStyle = faded(theme.paper, 0.66);
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.strokeStyle = theme.soft;
    context.lineWidth = 1;
    context.beginPath();
    context.roundRect(Math.max(0.5, left), 0.5, Math.min(width - 1, right - left), height - 1, 4);
    context.stroke();
    context.fillStyle = theme.ink;
    context.fillRect(whole.x(this.player.position) - 0.75, 0, 1.5, height);
  }

  wholeScale(width) {
    const whole = new Scale(this.session.end);
    whole.width = width;
    return whole;
  }

  /* The picture of the whole session, which changes only with the window's size. */
  makeOverview(canvas, width, height) {
    const layer = document.createElement("canvas");
    layer.width = canvas.width;
    layer.height = canvas.height;
    const context = layer.getContext("2d");
    const density = canvas.width / Math.max(1, width);
    context.setTransform(density, 0, 0, density, 0, 0);
    const scale = this.wholeScale(width);
    const { user, model } = this.session.sounds;
    for (const [voice, pieces, middle] of [
      ["user", user, 0.3],
      ["model", model, 0.7],
    ]) {
      const half = height * 0.24;
      const shape = {
        middle: height * middle,
        half,
        colour: this.theme[voice],
        gain: 0.95 / loudest(pieces),
      };
      drawWave(context, pieces, scale, shape);
    }
    for (const { kind, at } of this.happenings) {
      drawGlyph(context, kind, scale.x(at), 5, this.theme[SIGN_COLOURS[kind] ?? "user"], 2.5);
    }
    return layer;
  }

  // -- the pointer -------------------------------------------------------------------------------

  listen() {
    const { canvas, overview } = this;
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.up(event));
    canvas.addEventListener("pointercancel", (event) => this.pointers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    overview.addEventListener("pointerdown", (event) => this.overviewDown(event));
    overview.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) this.lookAt(event);
    });
    new ResizeObserver(() => this.resize()).observe(canvas);
    window
      .matchMedia("(prefers-color-scheme: dark)")
      .addEventListener("change", () => this.restyle());
  }

  overviewDown(event) {
    this.overview.setPointerCapture(event.pointerId);
    this.lookAt(event);
    this.on.seek(this.wholeScale(this.overview.clientWidth).time(event.offsetX));
  }

  lookAt(event) {
    const time = this.wholeScale(this.overview.clientWidth).time(event.offsetX);
    this.scale.show(time - this.scale.span / 2, this.scale.span);
    this.draw();
  }

  down(event) {
    if (event.button !== 0) return;
    this.canvas.setPointerCapture(event.pointerId);
    const place = { x: event.offsetX, y: event.offsetY };
    this.pointers.set(event.pointerId, {
      ...place,
      from: place,
      dragged: false,
      scrubs: place.y < RULER_PX && !event.shiftKey,
      marks: event.shiftKey,
    });
    if (place.y < RULER_PX && !event.shiftKey) this.on.seek(this.scale.time(place.x));
  }

  move(event) {
    const place = { x: event.offsetX, y: event.offsetY };
    const held = this.pointers.get(event.pointerId);
    if (!held) {
      this.hover(place);
      return;
    }
    if (Math.abs(place.x - held.from.x) > CLICK_PX) held.dragged = true;
    if (this.pointers.size === 2) this.pinch(event.pointerId, place);
    else if (held.scrubs) this.on.seek(this.scale.time(place.x));
    else if (held.marks) this.markPart(held.from.x, place.x);
    else if (held.dragged) this.scale.pan(held.x - place.x);
    if (!held.scrubs && !held.marks && held.dragged) this.on.looked();
    Object.assign(held, place);
    this.hover(held.dragged ? null : place);
    this.draw();
  }

  /* Shift and drag: from one pixel to another. */
  markPart(from, to) {
    const [begin, end] = [from, to].sort((a, b) => a - b).map((x) => this.scale.time(x));
    this.on.marked({ begin, end });
  }

  /* Two fingers: what is under each of them stays there. */
  pinch(id, place) {
    const other = [...this.pointers.entries()].find(([key]) => key !== id)[1];
    const held = this.pointers.get(id);
    const before = Math.max(20, Math.abs(held.x - other.x));
    const after = Math.max(20, Math.abs(place.x - other.x));
    this.scale.zoom(after / before, other.x);
  }

  up(event) {
    const held = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    if (!held || held.dragged || held.scrubs) return;
    const time = this.scale.time(event.offsetX);
    this.on.choose(this.thingAt(event.offsetX, event.offsetY), time);
  }

  wheel(event) {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : 1;
    const isSideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (isSideways) this.scale.pan((event.deltaX || event.deltaY) * unit);
    else this.scale.zoom(Math.exp(-event.deltaY * unit * 0.0022), event.offsetX);
    this.on.looked();
    this.hover({ x: event.offsetX, y: event.offsetY });
    this.draw();
  }

  /** What is at a place of the lanes; null for nothing. */
  thingAt(x, y) {
    const lane = this.lanes.find(({ top, height }) => y >= top && y < top + height);
    if (!lane) return null;
    return lane.hit(this.scale.time(x), REACH_PX / this.scale.density, y - lane.top);
  }

  hover(place) {
    this.pointer = place;
    const thing = place && this.thingAt(place.x, place.y);
    this.tip.hidden = !place;
    if (place) this.showTip(place, thing);
    this.canvas.style.cursor =
      place && place.y < RULER_PX ? "ew-resize" : thing ? "pointer" : "default";
    this.draw();
  }

  showTip(place, thing) {
    const time = Math.max(0, this.scale.time(place.x));
    const texts = [span_("tip-time", clock(time, 3))];
    if (thing)
      texts.push(
        span_("tip-title", thing.title),
        ...thing.lines.slice(0, 6).map((line) => span_("tip-line", line)),
      );
    this.tip.replaceChildren(...texts);
    const room = this.canvas.clientWidth - this.tip.offsetWidth - 4;
    this.tip.style.left = `${Math.max(4, Math.min(room, place.x + 14))}px`;
    const below = place.y + 18 + this.tip.offsetHeight < this.height;
    const above = Math.max(0, place.y - 12 - this.tip.offsetHeight);
    this.tip.style.top = `${below ? place.y + 18 : above}px`;
  }
}

function span_(className, text) {
  const made = document.createElement("span");
  made.className = className;
  made.textContent = text;
  return made;
}
