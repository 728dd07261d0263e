// What a conversation looks like: captions, the lane of its seconds, its measures, its levels.

import { Microphone } from "../microphone.js";
import { sentence } from "./api.js";
import { button, fill, h } from "./dom.js";

const LANE_MAX = 60;
/** Turns that stay on the page: an hour has some hundred. */
const CAPTIONS_MAX = 500;

const KINDS = /** @type {const} */ ({
  listen: "listened",
  speak: "spoke",
  late: "late",
  dropped: "dropped",
  failed: "failed",
});

/** The model's words, turn by turn; a screen reader reads them as they come. */
export class Captions {
  #list = h("ol", { class: "captions", "aria-label": "What the model says", tabIndex: 0 });
  #empty;
  /** @type {any} */ #last = null;
  #name = "";

  /** @param {string} text shown before the first words */
  constructor(text) {
    this.#empty = h("p", { class: "soft hint" }, text);
    const log = h("div", { role: "log", "aria-label": "What the model says" }, this.#list);
    this.element = h("div", { class: "stage-words" }, this.#empty, log);
  }

  /** @param {{responseId: string, text: string, isFinal: boolean, isInterrupted: boolean}} caption */
  tell({ responseId, text, isFinal, isInterrupted }) {
    this.#empty.hidden = true;
    if (!this.#last || this.#name !== responseId) {
      if (!text) return;
      this.#last = h("li", {});
      this.#name = responseId;
      this.#list.append(this.#last);
      while (this.#list.children.length > CAPTIONS_MAX) this.#list.firstChild.remove();
    }
    if (this.#last.firstChild?.data !== text) fill(this.#last, text);
    this.#last.classList.toggle("open", !isFinal);
    if (isInterrupted) this.#last.append(h("span", { class: "cut" }, " interrupted"));
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  clear() {
    fill(this.#list);
    this.#last = null;
    this.#name = "";
    this.#empty.hidden = false;
  }
}

/** One small bar a second: as high as its answer took, in the colour of its outcome. */
export class Lane {
  #bars = h("div", { class: "bars", role: "img", "aria-label": "No second yet" });
  #counts = { listen: 0, speak: 0, late: 0, dropped: 0, failed: 0 };
  #legend = h("p", { class: "legend" });

  constructor() {
    this.element = h("section", { class: "lane", "aria-label": "Seconds" }, this.#bars, this.#legend);
    this.clear();
  }

  /** @param {{kind: "listen" | "speak" | "dropped" | "failed", isLate: boolean, latencyMs: number | null}} unit */
  add({ kind, isLate, latencyMs }) {
    this.#counts[kind] += 1;
    if (isLate) this.#counts.late += 1;
    const took = latencyMs === null ? "" : `, answered in ${Math.round(latencyMs)} ms`;
    const bar = h("span", {
      class: `bar ${kind}${isLate ? " late" : ""}`,
      title: `${KINDS[kind]}${isLate ? ", late" : ""}${took}`,
    });
    bar.style.height = `${Math.round(Math.min(1, 0.18 + (latencyMs ?? 1000) / 1220) * 100)}%`;
    this.#bars.append(bar);
    while (this.#bars.children.length > LANE_MAX) this.#bars.firstChild.remove();
    this.#tell();
  }

  clear() {
    fill(this.#bars);
    this.#counts = { listen: 0, speak: 0, late: 0, dropped: 0, failed: 0 };
    this.#tell();
  }

  #tell() {
    const shown = Object.entries(this.#counts).filter(
      ([kind, count]) => count || kind === "listen" || kind === "speak",
    );
    fill(
      this.#legend,
      ...shown.map(([kind, count]) =>
        h("span", { class: `sign ${kind}` }, `${KINDS[/** @type {keyof typeof KINDS} */ (kind)]} ${count}`),
      ),
    );
    this.#bars.setAttribute(
      "aria-label",
      `Seconds: ${shown.map(([kind, count]) => `${KINDS[/** @type {keyof typeof KINDS} */ (kind)]} ${count}`).join(", ")}`,
    );
  }
}

/** The measures of a conversation. */
export class Measures {
  /** @type {Record<string, HTMLElement>} */ #values = {};
  #kv = h("span", { class: "part" });

  constructor() {
    const rows = [
      ["delay", "Response delay", "from your last word to the model’s first"],
      ["latency", "Latency", "from the end of a second to its answer"],
      ["kv", "KV cache", "tokens of the model’s context in use"],
      ["silent", "Stopped in", "from an interruption to silence"],
      ["time", "Time", "since the session began"],
      ["echo", "Echo", "how alike the microphone’s sound is to the loudspeaker’s, 0 to 1"],
    ];
    this.element = h(
      "dl",
      { class: "measures", "aria-label": "Measures" },
      ...rows.map(([id, name, note]) => {
        const value = h(id === "kv" ? "span" : "dd", {}, "–");
        this.#values[id] = value;
        const shown = id === "kv" ? h("dd", {}, value, h("div", { class: "gauge" }, this.#kv)) : value;
        return h("div", { title: note }, h("dt", {}, name), shown);
      }),
    );
  }

  /** @param {number | null} ms */
  delay(ms) {
    this.#values.delay.textContent = ms === null ? "–" : `${(ms / 1000).toFixed(1)} s`;
  }

  /** @param {number | null} ms */
  latency(ms) {
    if (ms !== null) this.#values.latency.textContent = `${Math.round(ms)} ms`;
  }

  /** @param {number} tokens @param {number | null} limit */
  kv(tokens, limit) {
    if (!tokens) return;
    this.#values.kv.textContent = limit
      ? `${tokens.toLocaleString()} of ${limit.toLocaleString()}`
      : tokens.toLocaleString();
    this.#kv.style.width = `${limit ? Math.min(100, (100 * tokens) / limit) : 0}%`;
  }

  /** @param {number} ms */
  silent(ms) {
    this.#values.silent.textContent = `${Math.round(ms)} ms`;
  }

  /** @param {import("../echo.js").EchoEvent} echo */
  echo({ correlation, delayMs, isHeard }) {
    this.#values.echo.textContent = correlation.toFixed(2) + (isHeard ? `, ${delayMs} ms` : "");
  }

  /** @param {string} text */
  time(text) {
    this.#values.time.textContent = text;
  }

  clear() {
    for (const value of Object.values(this.#values)) value.textContent = "–";
    this.#kv.style.width = "0";
  }
}

/** How loud the user is, before a conversation: the microphone is open while the test runs. */
export class Meter {
  /** @type {Microphone | null} */ #microphone = null;
  #level = h("meter", { max: 1, "aria-label": "How loud you are", hidden: true });
  #button = button("Test the microphone", () => this.#toggle(), { class: "quiet" });
  #problem = h("p", { class: "problem", role: "alert", hidden: true });
  #deviceId;
  #frame = 0;

  /** @param {() => string} deviceId of the chosen microphone; empty for the default */
  constructor(deviceId) {
    this.#deviceId = deviceId;
    this.element = h("div", { class: "row meter" }, this.#button, this.#level, this.#problem);
  }

  /** Let go of the microphone. */
  rest() {
    cancelAnimationFrame(this.#frame);
    this.#microphone?.close();
    this.#microphone = null;
    this.#level.hidden = true;
    this.#button.textContent = "Test the microphone";
  }

  async #toggle() {
    if (this.#microphone) return this.rest();
    const microphone = (this.#microphone = new Microphone({ deviceId: this.#deviceId() || undefined, onLost: () => this.rest() }));
    this.#button.textContent = "End the test";
    this.#say("");
    try {
      await microphone.open();
    } catch (error) {
      this.rest();
      return this.#say(sentence(/** @type {Error} */ (error).message));
    }
    if (this.#microphone !== microphone) return microphone.close(); // a conversation began meanwhile
    this.#level.hidden = false;
    const draw = () => {
      this.#level.value = Math.min(1, 3 * microphone.level);
      this.#frame = requestAnimationFrame(draw);
    };
    draw();
  }

  /** @param {string} text */
  #say(text) {
    this.#problem.textContent = text;
    this.#problem.hidden = !text;
  }
}

/** Two rings around the state: how loud the user is, and how loud the model. */
export class Levels {
  #user = h("span", { class: "ring user" });
  #model = h("span", { class: "ring model" });
  #frame = 0;

  constructor() {
    this.element = h(
      "div",
      { class: "orb", "aria-hidden": "true" },
      this.#user,
      this.#model,
      h("span", { class: "core" }),
    );
  }

  /** @param {{level: number}} microphone @param {{level: number}} speaker */
  follow(microphone, speaker) {
    cancelAnimationFrame(this.#frame);
    const draw = () => {
      this.#user.style.transform = `scale(${1 + Math.min(1, 3 * microphone.level) * 0.7})`;
      this.#model.style.transform = `scale(${1 + Math.min(1, speaker.level) * 0.6})`;
      this.#frame = requestAnimationFrame(draw);
    };
    draw();
  }

  rest() {
    cancelAnimationFrame(this.#frame);
    this.#user.style.transform = this.#model.style.transform = "scale(1)";
  }
}
