/**
 * A microphone as a stream of samples: 16 kHz mono, in blocks of 20 ms, with the echo of the page's
 * own sound taken out.
 *
 *     const microphone = new Microphone({ onSamples: (samples) => session.append(samples) });
 *     await microphone.open();      // the browser asks its user
 *
 * Rules: a muted microphone goes on with silence, since a full-duplex session needs each second. The
 * track is off meanwhile, so that the browser shows that nothing is heard. Errors are a `DeviceError`
 * whose `reason` a page can act on.
 */

import { AntiphonError } from "./antiphon.js";

const RATE = 16_000;
/** The audio thread's buffer: on a busy machine a browser loses much of what comes with the usual 10 ms. */
const LATENCY_S = 0.05;
/** Seen by meters: the share of the level before that is kept in each block of 20 ms. */
const FALL = 0.85;

/** Why a device cannot be used. */
export class DeviceError extends AntiphonError {
  /**
   * @param {"refused" | "missing" | "busy" | "insecure" | "unsupported"} reason
   * @param {string} message
   */
  constructor(reason, message) {
    super(message);
    this.reason = reason;
  }
}

const MESSAGES = {
  refused: "the browser does not let this page use it: allow it in the address bar, then try again",
  missing: "there is none on this device",
  busy: "another program uses it, or it does not answer",
  insecure: "browsers allow it only on https:// and on localhost",
  unsupported: "this browser cannot",
};

/**
 * Make a `DeviceError` of what a browser throws.
 * @param {unknown} error @param {string} device its name, for people
 * @returns {DeviceError}
 */
export function deviceError(error, device) {
  if (error instanceof DeviceError) return error;
  const name = error instanceof Error ? error.name : "";
  /** @type {keyof typeof MESSAGES} */
  let reason = "busy";
  if (["NotAllowedError", "SecurityError", "PermissionDeniedError"].includes(name)) reason = "refused";
  if (["NotFoundError", "OverconstrainedError", "DevicesNotFoundError"].includes(name)) reason = "missing";
  if (!globalThis.navigator?.mediaDevices) reason = globalThis.isSecureContext ? "unsupported" : "insecure";
  return new DeviceError(reason, `${device}: ${MESSAGES[reason]}`);
}

/**
 * List devices; their names are empty until the page may use one.
 * @param {"audioinput" | "audiooutput" | "videoinput"} kind
 * @returns {Promise<{id: string, name: string}[]>}
 */
export async function devices(kind) {
  const all = (await globalThis.navigator?.mediaDevices?.enumerateDevices()) ?? [];
  return all
    .filter((device) => device.kind === kind)
    .map(({ deviceId, label }) => ({ id: deviceId, name: label }));
}

/**
 * @typedef {object} MicrophoneOptions
 * @property {string} [deviceId] which one; by default the browser's
 * @property {boolean} [echoCancellation] takes out what the page plays (true)
 * @property {boolean} [noiseSuppression] (true)
 * @property {boolean} [autoGainControl] (true)
 * @property {(samples: Float32Array) => void} [onSamples] is told each block
 * @property {(error: DeviceError) => void} [onLost] is told when the device is gone
 */

/** The user's microphone. */
export class Microphone {
  /** The loudness now, 0 to 1, for a meter; what was loud falls within a third of a second. */
  level = 0;
  #options;
  #muted = false;
  /** @type {AudioContext | null} */ #context = null;
  /** @type {MediaStream | null} */ #stream = null;
  /** @type {Promise<void> | null} */ #opening = null;
  /** Which opening this is: what an earlier one brings is not wanted any more. */
  #turn = 0;

  /** @param {MicrophoneOptions} [options] */
  constructor(options = {}) {
    this.#options = options;
    this.onSamples = options.onSamples;
    this.onLost = options.onLost;
  }

  /** @returns {Promise<{id: string, name: string}[]>} the microphones that there are */
  static devices() {
    return devices("audioinput");
  }

  get isOpen() {
    return this.#context !== null;
  }

  /** Whether silence goes out in place of what is heard. */
  get muted() {
    return this.#muted;
  }

  set muted(muted) {
    this.#muted = muted;
    for (const track of this.#stream?.getAudioTracks() ?? []) track.enabled = !muted;
  }

  /** @throws {DeviceError} it is refused, missing, or in use */
  async open() {
    if (this.#context) return;
    this.#opening ??= this.#open();
    const opening = this.#opening;
    await opening.finally(() => {
      if (this.#opening === opening) this.#opening = null;
    });
  }

  /** Open it; one that is closed while its user is asked is let go of. */
  async #open() {
    const {
      deviceId,
      echoCancellation = true,
      noiseSuppression = true,
      autoGainControl = true,
    } = this.#options;
    const which = deviceId ? { deviceId: { exact: deviceId } } : {};
    const audio = { ...which, channelCount: 1, echoCancellation, noiseSuppression, autoGainControl };
    const turn = this.#turn;
    /** @type {MediaStream | null} */ let stream = null;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio });
      const context = await listen(stream, (samples) => turn === this.#turn && this.#hear(samples));
      if (turn !== this.#turn) return release(stream, context);
      [this.#stream, this.#context] = [stream, context];
    } catch (error) {
      release(stream, null);
      throw deviceError(error, "microphone");
    }
    this.muted = this.#muted;
    const [track] = stream.getAudioTracks();
    track.addEventListener("ended", () => {
      if (turn !== this.#turn) return;
      this.close();
      this.onLost?.(new DeviceError("missing", "microphone: it was taken away"));
    });
  }

  /** Take another microphone, from now on if it is open. @param {string} deviceId */
  async choose(deviceId) {
    const isOpen = this.isOpen;
    this.#options = { ...this.#options, deviceId };
    this.close();
    if (isOpen) await this.open();
  }

  /** Let go of the microphone; it can be opened again. */
  close() {
    this.#turn += 1;
    release(this.#stream, this.#context);
    [this.#stream, this.#context, this.#opening, this.level] = [null, null, null, 0];
  }

  /** @param {Float32Array} samples */
  #hear(samples) {
    if (this.#muted) samples.fill(0);
    let sum = 0;
    for (const sample of samples) sum += sample * sample;
    this.level = Math.max(Math.sqrt(sum / samples.length), this.level * FALL);
    this.onSamples?.(samples);
  }
}

/** @param {MediaStream | null} stream @param {AudioContext | null} context */
function release(stream, context) {
  for (const track of stream?.getTracks() ?? []) track.stop();
  context?.close();
}

/** @param {MediaStream} stream @param {(samples: Float32Array) => void} hear @returns {Promise<AudioContext>} */
async function listen(stream, hear) {
  for (const options of [{ sampleRate: RATE }, {}]) {
    const context = new AudioContext({ ...options, latencyHint: LATENCY_S });
    try {
      await context.audioWorklet.addModule(new URL("./worklets.js", import.meta.url));
      const source = context.createMediaStreamSource(stream); // Firefox: only at the device's own rate
      const node = new AudioWorkletNode(context, "antiphon-microphone", {
        channelCount: 1,
        channelCountMode: "explicit",
      });
      node.port.onmessage = ({ data }) => hear(data);
      source.connect(node).connect(context.destination); // it is silent; unconnected nodes may be left out
      await context.resume();
      return context;
    } catch (error) {
      await context.close();
      if (!("sampleRate" in options)) throw error;
    }
  }
  throw new DeviceError("unsupported", "microphone: this browser cannot");
}
