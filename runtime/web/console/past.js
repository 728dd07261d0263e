// What a conversation goes on from: a recorded one, which the page's address names.

import { askJson } from "./api.js";
import { fill, h, when } from "./dom.js";

/** `#talk/RECORDING/UNIT`: it begins with what was said before this unit, or with all that was said. */
export class Past {
  element = h("p", { class: "notice", role: "status", hidden: true });
  /** Of the recording; null without one. @type {"audio" | "video" | null} */ mode = null;
  /** Why none can begin from it now; empty where one can, or there is no recording. */ refusal = "";
  /** @type {{recording: string, unit?: number}} */ #fork = { recording: "" };
  #onFound;

  /** @param {() => void} onFound is told when `mode` may be another */
  constructor(onFound) {
    this.#onFound = onFound;
  }

  /** Read the address; an answer about one that was left is dropped. */
  async find() {
    const [page, recording = "", unit = ""] = location.hash.slice(1).split("/");
    if (page !== "talk") return;
    const fork = { recording, ...(unit ? { unit: Number(unit) } : {}) };
    [this.#fork, this.mode, this.refusal] = [fork, null, recording && "The recording is being looked for."];
    this.element.hidden = !recording;
    fill(this.element, this.refusal);
    if (!recording) return this.#onFound();
    const found = await askJson(`/api/recordings/${encodeURIComponent(recording)}`).catch((error) => error);
    if (this.#fork !== fork) return;
    this.#tell(found, unit);
    this.#onFound();
  }

  /** @param {any} found the recording, or an error @param {string} unit */
  #tell(found, unit) {
    const isSpoken = ["audio", "video"].includes(found.mode);
    this.refusal = isSpoken ? "" : found instanceof Error ? found.message : "Only a spoken conversation can go on.";
    this.mode = isSpoken ? found.mode : null;
    const of = found.began_ms ? when(found.began_ms) : this.#fork.recording;
    const kept = `The model will remember the conversation of ${of} ${unit ? `up to second ${unit}` : "to its end"}, and keep its prompt, voice and settings.`;
    fill(this.element, this.refusal || kept, " ", h("a", { href: "#talk" }, "Begin anew"));
  }

  /** What `Conversation` takes; null where there is nothing to go on from. */
  options() {
    return this.mode && { fork: this.#fork, mode: this.mode };
  }
}
