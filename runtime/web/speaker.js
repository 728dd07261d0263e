/**
 * A loudspeaker for sound that comes in pieces: 24 kHz mono, one piece after the other.
 *
 *     const speaker = new Speaker();
 *     await speaker.open();                     // after a click: browsers ask for one
 *     speaker.play(event.audio);
 *     const { cutMs } = await speaker.flush();  // the user interrupts
 *
 * Rules: a sound that follows a pause begins `cushionMs` later, so that the next piece may be late by
 * as much without a gap. `playedMs` counts sound that was played, never silence between.
 */

import { AntiphonError, MisuseError } from "./antiphon.js";
import { devices } from "./microphone.js";

const RATE = 24_000;
const CUSHION_MS = 80;
const FADE_MS = 30;
/** Ahead of the listener at first: a second comes each second. */
const BUFFER_S = 4;
/** A spoken answer of chat comes faster than it is heard; ten minutes are 58 MB. */
const BUFFER_S_MAX = 600;
/** For a flush: the audio thread answers in 40 ms, unless the context was suspended. */
const FLUSH_WAIT_MS = 500;

/**
 * @typedef {{playedMs: number, cutMs: number, cut: Float32Array}} Flushed `playedMs` since it was opened
 * @typedef {object} SpeakerOptions
 * @property {number} [rate] of the samples, in Hz (24000)
 * @property {number} [cushionMs] silence before a sound that follows a pause (80)
 * @property {string} [deviceId] which one, where the browser lets a page choose
 * @property {(playedMs: number) => void} [onPlayed] is told as sound is played, twenty times a second
 * @property {() => void} [onIdle] is told when all was played
 * @property {(levels: number[], frame: number) => void} [onLevels] is told how loud it was, 0 to 1, in frames of
 *   20 ms since it was opened, while sound is played; silent frames may be left out
 */

/** The user's loudspeaker. */
export class Speaker {
  /** Milliseconds of sound played since it was opened. */
  playedMs = 0;
  /** Milliseconds of sound that are still to be played. */
  queuedMs = 0;
  /** Milliseconds of sound that were thrown away, since ten minutes waited before them. */
  lostMs = 0;
  /** The peak of what is played now, 0 to 1, for a meter. */
  level = 0;
  #options;
  #rate;
  /** @type {AudioContext | null} */ #context = null;
  /** @type {AudioWorkletNode | null} */ #node = null;
  /** @type {GainNode | null} */ #gain = null;
  #volume = 1;
  #flushes = 0;
  /** @type {Map<number, (flushed: Flushed) => void>} */ #flushing = new Map();

  /** @param {SpeakerOptions} [options] */
  constructor(options = {}) {
    this.#options = options;
    this.#rate = options.rate ?? RATE;
    this.onPlayed = options.onPlayed;
    this.onIdle = options.onIdle;
    this.onLevels = options.onLevels;
  }

  /** @returns {Promise<{id: string, name: string}[]>} the loudspeakers that there are */
  static devices() {
    return devices("audiooutput");
  }

  get isOpen() {
    return this.#context !== null;
  }

  /** How loud, 0 to 1. */
  get volume() {
    return this.#volume;
  }

  set volume(volume) {
    this.#volume = volume;
    this.#gain?.gain.setTargetAtTime(volume, 0, 0.01);
  }

  /** Prepare to play; call it after a click or a key. */
  async open() {
    if (this.#context) return;
    const context = new AudioContext({ sampleRate: this.#rate, latencyHint: "interactive" });
    this.#context = context;
    try {
      await context.audioWorklet.addModule(new URL("./worklets.js", import.meta.url));
      if (this.#options.deviceId) await this.choose(this.#options.deviceId);
      await context.resume();
    } catch (error) {
      this.close();
      throw new AntiphonError(`the sound cannot be played: ${error instanceof Error ? error.message : error}`);
    }
    if (this.#context !== context) return; // closed meanwhile
    const cushion = Math.round(((this.#options.cushionMs ?? CUSHION_MS) * this.#rate) / 1000);
    this.#node = new AudioWorkletNode(context, "antiphon-speaker", {
      numberOfInputs: 0,
      outputChannelCount: [1],
      processorOptions: { capacity: BUFFER_S * this.#rate, most: BUFFER_S_MAX * this.#rate, cushion },
    });
    this.#gain = new GainNode(context, { gain: this.#volume });
    this.#node.port.onmessage = ({ data }) => this.#note(data);
    this.#node.connect(this.#gain).connect(context.destination);
  }

  /** Play another loudspeaker, where the browser lets a page choose. @param {string} deviceId */
  async choose(deviceId) {
    this.#options = { ...this.#options, deviceId };
    await /** @type {any} */ (this.#context)?.setSinkId?.(deviceId);
  }

  /** @param {Float32Array} samples they are taken over: the caller's array is empty afterwards */
  play(samples) {
    if (!this.#node) throw new MisuseError("the speaker is not open");
    if (samples.length === 0) return;
    this.queuedMs += (samples.length / this.#rate) * 1000;
    const whole = samples.byteLength === samples.buffer.byteLength ? samples : samples.slice();
    this.#node.port.postMessage({ type: "play", samples: whole }, [whole.buffer]);
  }

  /**
   * Stop, at once: what plays fades out within `fadeMs`, and the rest is thrown away.
   * @param {{fadeMs?: number}} [how]
   * @returns {Promise<Flushed>} settled when it is silent, with what was not heard
   */
  flush({ fadeMs = FADE_MS } = {}) {
    const node = this.#node;
    if (!node) return Promise.resolve({ playedMs: this.playedMs, cutMs: 0, cut: new Float32Array(0) });
    const id = ++this.#flushes;
    return new Promise((resolve) => {
      this.#flushing.set(id, resolve);
      node.port.postMessage({ type: "flush", id, fade: Math.round((fadeMs * this.#rate) / 1000) });
      setTimeout(
        () => this.#settle(id, { playedMs: this.playedMs, cutMs: this.queuedMs, cut: new Float32Array(0) }),
        FLUSH_WAIT_MS,
      );
    });
  }

  /** Let go of the loudspeaker; it can be opened again, and then counts from zero. */
  close() {
    this.#context?.close();
    [this.#context, this.#node, this.#gain] = [null, null, null];
    for (const id of [...this.#flushing.keys()])
      this.#settle(id, { playedMs: this.playedMs, cutMs: this.queuedMs, cut: new Float32Array(0) });
    [this.playedMs, this.queuedMs, this.lostMs, this.level] = [0, 0, 0, 0];
  }

  /** @param {number} id @param {Flushed} flushed */
  #settle(id, flushed) {
    this.#flushing.get(id)?.(flushed);
    this.#flushing.delete(id);
  }

  /** @param {any} data of the audio thread */
  #note(data) {
    if (data.played !== undefined) this.playedMs = (data.played / this.#rate) * 1000;
    if (data.type === "full") this.lostMs += (data.lost / this.#rate) * 1000;
    if (data.type === "played") {
      this.queuedMs = (data.queued / this.#rate) * 1000;
      this.level = data.queued ? data.peak : 0;
      this.onPlayed?.(this.playedMs);
      this.onLevels?.(data.levels, data.frame);
      if (!data.queued) this.onIdle?.();
    } else if (data.type === "flushed") {
      this.queuedMs = 0;
      this.level = 0;
      this.onPlayed?.(this.playedMs);
      this.#settle(data.id, {
        playedMs: this.playedMs,
        cutMs: (data.cut.length / this.#rate) * 1000,
        cut: data.cut,
      });
    }
  }
}
