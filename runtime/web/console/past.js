// What a conversation goes on from: a recorded one, which the page's address names.

import { askJson } from "./api.js";
import { fill, h, when } from "./dom.js";

/** `#talk/RECORDING/UNIT`: it begins with what was said before this unit, or with all that was said. */
export class Past {
  element = h("p", { class: "notice", role: "status", hidden: true });
  /** Of the recording; null without one. @type {"audio" | "video" | null} */ mode = null;
  #fork = { recording: "" };
  #onFound;

  /** @param {() => void} onFound is told when `mode` may be another */
  constructor(onFound) {
    this.#onFound = onFound;
  }

  /** Read the address. */
  async find() {
    const [page, recording, unit] = location.hash.slice(1).split("/");
    if (page !== "talk") return;
    const name = decodeURIComponent(recording ?? "");
    this.#fork = { recording: name, ...(unit ? { unit: Number(unit) } : {}) };
    this.mode = null;
    this.element.hidden = !name;
    if (name) await this.#tell(name, unit).catch((error) => fill(this.element, error.message));
    this.#onFound();
  }

  /** @param {string} name @param {string} [unit] */
  async #tell(name, unit) {
    const { mode, began_ms: began } = await askJson(`/api/recordings/${encodeURIComponent(name)}`);
    this.mode = mode;
    fill(
      this.element,
      `The model will remember the conversation of ${began === null ? name : when(began)} `,
      `${unit ? `up to second ${unit}` : "to its end"}, and keep its prompt, voice and settings. `,
      h("a", { href: "#talk" }, "Begin anew"),
    );
  }

  /** What `Conversation` takes; null where there is nothing to go on from. */
  options() {
    return this.mode && { fork: this.#fork, mode: this.mode };
  }
}
