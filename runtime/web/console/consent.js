// Whether what is said is recorded: the operator's notice, and the switch that turns recording off.

import { check, h } from "./dom.js";

/** On each page that begins sessions: Talk, Chat and Transcribe. */
export class Consent {
  #switch;
  #words = h("p", { class: "soft small" });
  #kind;
  /** @type {any} */ #recording = {};
  #isFork = false;

  /** @param {string} kind of session, as in a sentence @param {() => void} [onChange] is told when the switch is moved */
  constructor(kind, onChange = () => {}) {
    this.#kind = kind;
    this.#switch = check(`Do not record this ${kind}`, { onchange: () => (this.#tell(), onChange()) });
    this.element = h("div", { class: "consent" }, this.#words, this.#switch);
  }

  /** @param {any} facts of the server */
  learn({ recording }) {
    this.#recording = recording;
    this.#tell();
  }

  /** @param {boolean} isFork a session that goes on from a recorded one is recorded too */
  require(isFork) {
    this.#isFork = isFork;
    this.#tell();
  }

  /** What `connect` takes. */
  options() {
    return this.#isRefused ? { record: false } : {};
  }

  /** @param {boolean} isRunning a session: it stays as it began */
  lock(isRunning) {
    this.#switch.input.disabled = isRunning;
  }

  get #isRefused() {
    return this.#switch.input.checked && !this.#switch.hidden;
  }

  #tell() {
    const { is_on: isOn, is_always: isAlways, notice } = this.#recording;
    this.#switch.hidden = !isOn || isAlways || this.#isFork;
    const isRecorded = isOn && !this.#isRefused;
    const text = `This ${this.#kind} is ${isRecorded ? "" : "not "}recorded.`;
    this.#words.textContent = isRecorded && notice ? `${text} ${notice}` : text;
  }
}
