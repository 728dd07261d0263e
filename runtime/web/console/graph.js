// A graph: what a number was in the last minutes, up to an hour.

import { duration, h } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
/** Milliseconds that a graph may show: the shortest that holds what is known. */
const SPANS = [120_000, 600_000, 3_600_000];
const [WIDTH, HEIGHT] = [600, 100];

/** @param {string} tag @param {Record<string, string | number>} attributes */
function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}

/** The next of 1, 2, 5, 10, 20... @param {number} value */
function ceiling(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 2, 5, 10].map((it) => it * unit).find((it) => it >= value) ?? value;
}

export class Graph {
  /** @type {{at: number, value: number}[]} */ #points = [];
  #name;
  #most = 0;
  #line = svg("polyline", { class: "line" });
  #limit = svg("line", { class: "limit", x1: 0, x2: WIDTH });
  #plot = svg("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
  #now = h("span", {});
  #top = h("span", {});
  #since = h("span", {});
  #read = h("span", {}, "now");

  /** @param {string} name @param {string} note what is counted */
  constructor(name, note) {
    this.#name = name;
    const grid = [0.5, HEIGHT / 2, HEIGHT - 0.5].map((y) => svg("line", { class: "rule", x1: 0, x2: WIDTH, y1: y, y2: y }));
    this.#plot.append(...grid, this.#limit, this.#line);
    this.#plot.addEventListener("pointermove", (event) => this.#point(event));
    this.#plot.addEventListener("pointerleave", () => this.#draw());
    this.element = h(
      "figure",
      { class: "graph" },
      h("figcaption", { title: note }, h("span", {}, name), this.#now),
      h("p", { class: "scale" }, this.#top),
      this.#plot,
      h("p", { class: "scale" }, this.#since, this.#read),
    );
  }

  /** @param {number} value now @param {number} [limit] what it cannot exceed; none by default */
  add(value, limit = 0) {
    const at = performance.now();
    this.#points.push({ at, value });
    while (at - this.#points[0].at > SPANS[SPANS.length - 1]) this.#points.shift();
    this.#most = ceiling(Math.max(limit, ...this.#points.map((it) => it.value)));
    this.#limit.setAttribute("visibility", limit ? "visible" : "hidden");
    for (const end of ["y1", "y2"]) this.#limit.setAttribute(end, String(this.#y(limit)));
    this.#draw();
  }

  get #span() {
    const [first, last] = [this.#points[0], this.#points[this.#points.length - 1]];
    return SPANS.find((it) => it >= last.at - first.at) ?? SPANS[SPANS.length - 1];
  }

  /** @param {number} value */
  #y(value) {
    return HEIGHT - (HEIGHT * value) / this.#most;
  }

  #draw() {
    const last = this.#points[this.#points.length - 1];
    if (!last) return;
    const x = (/** @type {number} */ at) => WIDTH - (WIDTH * (last.at - at)) / this.#span;
    this.#line.setAttribute("points", this.#points.map(({ at, value }) => `${x(at).toFixed(1)},${this.#y(value).toFixed(1)}`).join(" "));
    const most = Math.max(...this.#points.map((it) => it.value));
    this.#now.textContent = last.value.toLocaleString();
    this.#top.textContent = this.#most.toLocaleString();
    this.#since.textContent = `${this.#span / 60_000} min ago`;
    this.#read.textContent = "now";
    this.#plot.setAttribute("aria-label", `${this.#name}: ${last.value} now, at most ${most} in the last ${this.#span / 60_000} minutes`);
  }

  /** Say what the value was where the pointer is. @param {PointerEvent} event */
  #point(event) {
    const last = this.#points[this.#points.length - 1];
    if (!last) return;
    const { left, width } = this.#plot.getBoundingClientRect();
    const at = last.at - this.#span * (1 - (event.clientX - left) / width);
    const found = this.#points.findLast((it) => it.at <= at);
    this.#read.textContent = found ? `${duration(last.at - found.at)} ago: ${found.value.toLocaleString()}` : "not known";
  }
}
