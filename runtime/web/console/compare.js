// Compare: two recordings side by side, with their voices, their words and where they first differ.

import { ask, askJson } from "./api.js";
import { nameOf, pageLink } from "./actions.js";
import { readDigest } from "./digests.js";
import { button, duration, fill, h, notice } from "./dom.js";
import { DIFFERENCES } from "./words.js";

/** How long before words begin they are played from: the ear needs a moment. */
const BEFORE_S = 0.2;
/** @type {Record<string, string>} */
const PLACES = { unit: "second", chunk: "second" };
const VOICES = { user: "You", model: "Model" };

/** @param {import("./main.js").App} app @returns {import("./main.js").Page} */
export function comparePage(app) {
  const page = new ComparePage(app);
  return { element: page.element, show: () => page.load(), hide: () => page.rest() };
}

class ComparePage {
  #app;
  #sides = h("div", { class: "sides" });
  #difference = h("div", { class: "card stack", hidden: true });
  #notice = notice("bad");
  #asked = "";
  /** @type {string[]} */ #sounds = [];

  /** @param {import("./main.js").App} app */
  constructor(app) {
    this.#app = app;
    this.element = h(
      "section",
      { class: "stack", "aria-label": "Compare" },
      h(
        "div",
        { class: "head-row" },
        h("h1", {}, "Two recordings"),
        h("a", { class: "button", href: "#recordings" }, "All recordings"),
      ),
      this.#notice.element,
      this.#difference,
      this.#sides,
    );
    addEventListener("hashchange", () => this.element.hidden || this.load());
  }

  /** Let go of the sounds. */
  rest() {
    for (const player of this.#sides.querySelectorAll("audio")) player.pause();
  }

  /** Show the two recordings that the address names. */
  async load() {
    const { hash } = location;
    const [page, one, other] = hash.slice(1).split("/");
    if (page !== "compare" || hash === this.#asked) return;
    this.#asked = hash;
    this.#sounds.splice(0).forEach((it) => URL.revokeObjectURL(it));
    fill(this.#sides);
    this.#difference.hidden = true;
    if (!one || !other) return this.#notice.say("Select two recordings in the list, and choose Compare.");
    this.#notice.say("Both recordings are read…", "");
    try {
      const [a, b] = [await this.#read(one), await this.#read(other)];
      const difference = await readDigest(`/api/recordings/${one}/digest?diff=${other}`);
      if (this.#asked !== hash) return;
      this.#notice.say("");
      this.#tell(difference, a.it, b.it);
      const parts = partOf(a.digest.said, b.digest.said);
      const players = [a, b].map(({ it }) => h("audio", { controls: true, "aria-label": `Both voices of ${nameOf(it)}` }));
      fill(this.#sides, this.#side(a, parts, b, players[0]), this.#side(b, parts, a, players[1]));
      await this.#fetchSound(players[0], a.it); // a server makes few at once
      await this.#fetchSound(players[1], b.it);
    } catch (error) {
      if (this.#asked === hash) this.#notice.say(/** @type {Error} */ (error).message);
      this.#asked = "";
    }
  }

  /** @param {string} id as the address has it */
  async #read(id) {
    const path = `/api/recordings/${id}`;
    return { it: await askJson(path), digest: await readDigest(`${path}/digest`) };
  }

  /** @param {any} difference @param {any} a @param {any} b */
  #tell({ first, differences, compared, same }, a, b) {
    this.#difference.hidden = false;
    if (!first) return fill(this.#difference, h("p", {}, "They are the same: input, decisions, words and sound."));
    const place = first.index === null ? `the ${first.what}` : `${PLACES[first.what] ?? first.what} ${first.index}`;
    const what = [...new Set(first.fields.map((/** @type {string} */ it) => DIFFERENCES[it]).filter(Boolean))].join(", ");
    const count = differences === 1 ? "the only difference" : `the first of ${differences} differences`;
    const value = (/** @type {any} */ it, /** @type {string} */ text) =>
      h("div", {}, h("p", { class: "soft small" }, nameOf(it)), h("p", {}, what ? text : text === "nothing" ? "ends here" : "goes on"));
    const isText = !/(hash|ids|pcm)$/.test(first.fields[0]); // numbers and hashes tell a reader nothing
    fill(
      this.#difference,
      h("h2", {}, `They part at ${place}`),
      h("p", { class: "soft" }, `${what ? `${what[0].toUpperCase()}${what.slice(1)}` : "One is longer"}: ${count}. ${same} of ${compared} ${first.what === "turn" ? "turns" : "seconds"} are the same.`),
      isText ? h("div", { class: "sides" }, value(a, first.here), value(b, first.there)) : "",
    );
  }

  /** @param {any} side @param {number} parts the first passage that differs @param {any} other @param {any} player */
  #side({ it, digest }, parts, other, player) {
    const { measures, said } = digest;
    const seek = (/** @type {number} */ ms) => {
      player.currentTime = Math.max(0, ms / 1000 - BEFORE_S);
      player.play();
    };
    const facts = [
      ["Length", it.duration_ms === null ? "–" : duration(it.duration_ms)],
      ["Response delay", measures.response_delay === undefined ? "–" : `${measures.response_delay.toFixed(2)} s`],
      ["Dropped", measures.dropped_units === undefined ? "–" : `${measures.dropped_units} s`],
    ];
    const passage = (/** @type {any} */ words, /** @type {number} */ index) =>
      h(
        "li",
        { class: index === parts ? `${words.voice} parts` : words.voice },
        index === parts && h("p", { class: "warn small" }, "Here the words part"),
        h("span", { class: "who" }, `${VOICES[/** @type {"user" | "model"} */ (words.voice)]} `),
        button(duration(words.at_ms), () => seek(words.at_ms), { class: "quiet when", "aria-label": `Play from ${duration(words.at_ms)}` }),
        h("p", {}, words.text.trim()),
      );
    const differs = `?diff=${encodeURIComponent(other.it.recording_id)}`;
    return h(
      "section",
      { class: "card stack", "aria-label": nameOf(it) },
      h("h2", {}, nameOf(it)),
      player,
      h("dl", { class: "measures" }, ...facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      said.length ? h("ol", { class: "captions whole" }, ...said.map(passage)) : h("p", { class: "soft" }, "There are no words."),
      h("p", { class: "soft small" }, pageLink(it, this.#app.facts.recording.has_views, "Its page, with all differences marked", differs)),
    );
  }

  /** @param {any} player @param {any} it */
  async #fetchSound(player, it) {
    try {
      const answer = await ask(`/v1/live/sessions/${encodeURIComponent(it.recording_id)}/content`);
      this.#sounds.push((player.src = URL.createObjectURL(await answer.blob())));
    } catch (error) {
      player.replaceWith(h("p", { class: "soft" }, `Without sound: ${/** @type {Error} */ (error).message}`));
    }
  }
}

/** The index of the first passage that differs; -1 for none. @param {any[]} a @param {any[]} b */
export function partOf(a, b) {
  const textOf = (/** @type {any} */ it) => it && `${it.voice} ${it.text.trim()}`;
  for (let i = 0; i < Math.max(a.length, b.length); i++) if (textOf(a[i]) !== textOf(b[i])) return i;
  return -1;
}
