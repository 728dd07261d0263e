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
  call: "called a tool",
});

/** Words of one utterance follow each other without a longer pause, its sentences with a space. */
const PAUSE_MS = 2000;
/** Words are transcribed so long after they begin, at least: an answer since then follows them. */
const WRITTEN_MS = 1500;

/** What both said, turn by turn; a screen reader reads it as it comes. */
export class Captions {
  #list = h("ol", { class: "captions", "aria-label": "What is said", tabIndex: 0 });
  #empty = h("p", { class: "soft hint" });
  /** The model's last turn. @type {any} */ #turn = null;
  /** The user's last utterance. @type {any} */ #utterance = null;
  #name = "";
  #endMs = -Infinity;
  #beganAt = 0;

  constructor() {
    const log = h("div", { role: "log", "aria-label": "What is said" }, this.#list);
    this.element = h("div", { class: "stage-words" }, this.#empty, log);
  }

  /** @param {string} text shown before the first words */
  explain(text) {
    this.#empty.textContent = text;
  }

  /** The model's words. @param {{responseId: string, text: string, isFinal: boolean, isInterrupted: boolean}} caption */
  model({ responseId, text, isFinal, isInterrupted }) {
    if (!this.#turn || this.#name !== responseId) {
      if (!text) return;
      this.#name = responseId;
      this.#beganAt = performance.now();
      this.#turn = this.#add("model", "Model");
    }
    const words = this.#turn.lastChild;
    if (words.firstChild?.data !== text) fill(words, text);
    this.#turn.classList.toggle("open", !isFinal);
    if (isInterrupted) words.append(h("span", { class: "cut" }, " interrupted"));
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  /** The user's. @param {{text: string, startMs: number, endMs: number}} words */
  user({ text, startMs, endMs }) {
    const isNext = /[.?!]$/.test(this.#utterance?.textContent ?? "") && /^\S/.test(text);
    if (!this.#utterance || isNext || startMs - this.#endMs > PAUSE_MS) {
      const isAnswered = this.#turn === this.#list.lastChild && performance.now() - this.#beganAt < WRITTEN_MS;
      this.#utterance = this.#add("user", "You", isAnswered ? this.#turn : null);
    }
    this.#endMs = endMs;
    this.#utterance.lastChild.append(text);
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  /** A call that the page has answered. @param {import("../antiphon.js").CallEvent} call @param {string} result */
  tool({ name, arguments: given }, result) {
    this.#add("tool", "Tool").lastChild.append(`${name} ${given} → ${result}`);
    this.#list.scrollTop = this.#list.scrollHeight;
  }

  /** @param {string} voice @param {string} name @param {Node | null} [before] */
  #add(voice, name, before = null) {
    this.#empty.hidden = true;
    const item = h("li", { class: voice }, h("span", { class: "who" }, name), h("span", { class: "said" }));
    this.#list.insertBefore(item, before);
    while (this.#list.children.length > CAPTIONS_MAX) this.#list.firstChild.remove();
    return item;
  }

  /** Nothing more is said. */
  rest() {
    this.#turn?.classList.remove("open");
  }

  clear() {
    fill(this.#list);
    [this.#turn, this.#utterance, this.#name, this.#endMs] = [null, null, "", -Infinity];
    this.#empty.hidden = false;
  }
}

/** One small bar a second: as high as its answer took, in the colour of its outcome. */
export class Lane {
  #bars = h("div", { class: "bars", role: "img", "aria-label": "No second yet" });
  #counts = { listen: 0, speak: 0, late: 0, dropped: 0, failed: 0, call: 0 };
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

  /** The model called a tool after the last second. @param {import("../antiphon.js").CallEvent} call */
  call({ name, arguments: given }) {
    this.#counts.call += 1;
    const bar = this.#bars.lastChild;
    bar?.classList.add("call");
    if (bar) bar.title += `, called ${name} ${given}`;
    this.#tell();
  }

  clear() {
    fill(this.#bars);
    this.#counts = { listen: 0, speak: 0, late: 0, dropped: 0, failed: 0, call: 0 };
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
  #level = h("meter", { max: 1, "aria-label": "How loud you are" });
  #button = button("Test the microphone", () => this.#toggle(), { class: "quiet" });
  #problem = h("p", { class: "problem", role: "alert", hidden: true });
  #deviceId;
  #frame = 0;

  /** @param {() => string} deviceId of the chosen microphone; empty for the default */
  constructor(deviceId) {
    this.#deviceId = deviceId;
    this.element = h("div", { class: "row meter" }, this.#level, this.#button, this.#problem);
  }

  /** Let go of the microphone. */
  rest() {
    cancelAnimationFrame(this.#frame);
    this.#microphone?.close();
    this.#microphone = null;
    this.#level.value = 0;
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
