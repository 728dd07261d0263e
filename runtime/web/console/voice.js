// A voice that is recorded on the page: up to ten seconds of the user's own, as a WAV file.

import { encodeBase64 } from "../antiphon.js";
import { Microphone } from "../microphone.js";
import { sentence } from "./api.js";
import { button, h } from "./dom.js";

const RATE = 16_000;
const SECONDS_MAX = 10;
const SECONDS_MIN = 1;
const BLOCKS_PER_S = 50;
/** Speech is louder than -40 dB, for 0.3 s at least. */
const SPEECH = 0.01;
const SPEECH_BLOCKS_MIN = 15;
/** A click on "Stop" that comes as late as this after the ten seconds does not start another recording. */
const LATE_MS = 700;
/** From -60 dB to 0, on a scale of dB. */
const shown = (/** @type {number} */ level) => Math.max(0, 1 + Math.log10(level + 1e-9) / 3);

/** Records a voice; nothing of it leaves the page before a conversation begins. */
export class OwnVoice {
  #deviceId;
  #onOpened;
  /** @type {Microphone | null} */ #microphone = null;
  /** @type {Float32Array[]} */ #blocks = [];
  #endedAt = -LATE_MS;
  /** @type {string | null} */ #base64 = null;

  #record = button("Record", () => this.#toggle());
  #discard = button("Discard", () => this.#throwAway(), { class: "quiet", hidden: true });
  #left = h("span", { class: "soft", role: "timer", hidden: true });
  #level = h("meter", { max: 1, "aria-label": "How loud you are", hidden: true });
  #player = h("audio", { controls: true, "aria-label": "Your voice", hidden: true });
  #status = h("p", { class: "soft small", role: "status" });
  #problem = h("p", { class: "problem", role: "alert", hidden: true });

  /** @param {() => string | undefined} deviceId the microphone @param {() => void} onOpened it was let in */
  constructor(deviceId, onOpened) {
    this.#deviceId = deviceId;
    this.#onOpened = onOpened;
    this.element = h(
      "div",
      { class: "own-voice", role: "group", "aria-label": "Your voice", hidden: true },
      h("p", { class: "small" }, "Read aloud, for example:"),
      h(
        "blockquote",
        {},
        "The north wind and the sun argued which of them was the stronger, when a traveller came along in a warm cloak.",
      ),
      h("div", { class: "row" }, this.#record, this.#discard, this.#left),
      this.#level,
      this.#player,
      this.#status,
      this.#problem,
      h("p", { class: "soft small" }, "Sent when a conversation begins, and lost when this page is closed."),
    );
  }

  /** Let go of microphone and loudspeaker; what is being recorded is thrown away. */
  rest() {
    this.#player.pause();
    if (this.#microphone) this.#close();
    this.#blocks = [];
  }

  /** The WAV file as base64; null, with a message on the page, where there is none yet. */
  take() {
    this.#player.pause();
    if (this.#base64 && !this.#microphone) return this.#base64;
    if (this.#microphone) this.#refuse("Stop the recording of your voice first.");
    else this.#refuse("There is no recording of your voice yet.");
    this.#record.focus(); // on a small window it is out of sight
    return null;
  }

  #throwAway() {
    URL.revokeObjectURL(this.#player.src);
    this.#player.removeAttribute("src");
    this.#base64 = null;
    this.#settle("");
    this.#record.focus();
  }

  // -- recording -----------------------------------------------------------------------------------

  async #toggle() {
    if (this.#microphone?.isOpen) return this.#finish();
    if (this.#microphone || performance.now() - this.#endedAt < LATE_MS) return;
    this.#player.pause();
    this.#blocks = [];
    this.#count();
    const asItIs = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
    const microphone = new Microphone({
      ...asItIs,
      deviceId: this.#deviceId(),
      onSamples: (samples) => this.#hear(samples),
      onLost: (error) => this.#fail(error),
    });
    this.#microphone = microphone;
    this.#settle("Allow the microphone, then speak.");
    try {
      await microphone.open();
      if (this.#microphone !== microphone) return;
      this.#settle("Recording.");
      this.#onOpened();
    } catch (error) {
      if (this.#microphone === microphone) this.#fail(/** @type {Error} */ (error));
    }
  }

  /** @param {Float32Array} samples */
  #hear(samples) {
    this.#blocks.push(samples);
    if (this.#count() > 0) return;
    this.#endedAt = performance.now();
    this.#finish();
  }

  /** Show how loud it is, and how much is left. @returns {number} in seconds */
  #count() {
    const left = SECONDS_MAX - this.#blocks.length / BLOCKS_PER_S;
    this.#level.value = shown(this.#microphone?.level ?? 0);
    this.#left.textContent = `${Math.ceil(left)} s left`;
    return left;
  }

  #finish() {
    const blocks = this.#blocks.splice(0);
    this.#close();
    const seconds = blocks.length / BLOCKS_PER_S;
    const loud = blocks.filter((block) => Math.hypot(...block) > SPEECH * Math.sqrt(block.length));
    if (seconds < SECONDS_MIN) return this.#refuse("That was too short: speak for at least a second.");
    if (loud.length < SPEECH_BLOCKS_MIN)
      return this.#refuse("Nothing was heard: is the right microphone chosen, and is it on?");
    const file = wav(blocks);
    this.#base64 = encodeBase64(file);
    URL.revokeObjectURL(this.#player.src);
    this.#player.src = URL.createObjectURL(new Blob([file], { type: "audio/wav" }));
    this.#settle(`${seconds.toFixed(1)} s are recorded.`);
  }

  /** @param {Error} error */
  #fail(error) {
    this.#close();
    this.#refuse(sentence(error.message));
  }

  #close() {
    this.#microphone?.close();
    this.#microphone = null;
    this.#settle("");
  }

  /** @param {string} problem */
  #refuse(problem) {
    this.#problem.textContent = problem;
    this.#problem.hidden = false;
  }

  /** Show what there is to do now. @param {string} status */
  #settle(status) {
    const isOpen = this.#microphone?.isOpen ?? false;
    this.#record.textContent = isOpen ? "Stop" : this.#base64 ? "Record again" : "Record";
    this.#record.classList.toggle("primary", isOpen);
    this.#left.hidden = this.#level.hidden = !isOpen;
    this.#player.hidden = this.#discard.hidden = isOpen || !this.#base64;
    this.#status.textContent = status;
    this.#problem.hidden = true;
  }
}

/** @param {Float32Array[]} blocks at 16 kHz @returns {ArrayBuffer} a WAV file of 16 bits, mono */
function wav(blocks) {
  const samples = blocks.flatMap((block) => [...block]);
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (/** @type {number} */ at, /** @type {string} */ word) =>
    [...word].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, i) => view.setInt16(44 + 2 * i, Math.max(-1, Math.min(1, sample)) * 0x7fff, true));
  return view.buffer;
}
