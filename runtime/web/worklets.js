/**
 * The two audio processors, which run in the browser's audio thread: `Microphone` and `Speaker` load
 * this file into their contexts (a policy without `blob:` allows it, as it is a file).
 *
 * - `antiphon-microphone` hands over blocks of `BLOCK_MS` at 16 kHz mono, resampled where its context
 *   runs at another rate.
 * - `antiphon-speaker` plays samples from a ring buffer, one sound after the other; `flush` fades out
 *   and throws the rest away. It tells what it has played, so that no program has to guess from a clock.
 *
 * One file without imports: tools that bundle a page copy it as it is.
 */

const { AudioWorkletProcessor = Object, registerProcessor, sampleRate } = /** @type {any} */ (globalThis);

const INPUT_RATE = 16_000;
const BLOCK_SAMPLES = 320;
/** Reports of what was played, at most this often while something plays. */
const REPORTS_PER_S = 20;
/** Levels of the sound that was played, told with each report: those since the last one, and at most 160 ms. */
const FRAMES_PER_S = 50;
const LEVELS_MAX = 8;
/** Of the resampler's kernel, to either side. */
const CROSSINGS = 16;
/** The transition band: the pass band ends this far below half of the lower rate. */
const ROLLOFF = 0.92;
/** Kernels for this many places between two samples; between these the nearest is taken. */
const PHASES = 256;

class MicrophoneProcessor extends AudioWorkletProcessor {
  #resampler = sampleRate === INPUT_RATE ? null : new Resampler(sampleRate, INPUT_RATE);
  #block = new Float32Array(BLOCK_SAMPLES);
  #filled = 0;

  /** @param {Float32Array[][]} inputs */
  process([channels]) {
    if (!channels?.length) return true; // no device for a moment
    const samples = this.#resampler ? this.#resampler.push(channels[0]) : channels[0];
    for (let from = 0; from < samples.length; ) {
      const count = Math.min(samples.length - from, BLOCK_SAMPLES - this.#filled);
      this.#block.set(samples.subarray(from, from + count), this.#filled);
      this.#filled += count;
      from += count;
      if (this.#filled === BLOCK_SAMPLES) this.#hand();
    }
    return true;
  }

  #hand() {
    this.port.postMessage(this.#block, [this.#block.buffer]);
    this.#block = new Float32Array(BLOCK_SAMPLES);
    this.#filled = 0;
  }
}

class SpeakerProcessor extends AudioWorkletProcessor {
  #ring;
  #cushion;
  #most;
  #read = 0;
  #held = 0;
  #played = 0;
  #wait = 0;
  /** @type {{id: number, left: number, total: number, cut: Float32Array} | null} */ #fade = null;
  #sinceReport = 0;
  #peak = 0;
  #reported = 0;
  #frame = Math.round(sampleRate / FRAMES_PER_S);
  #power = 0;
  #samples = 0;
  /** @type {number[]} */ #levels = [];

  /** @param {{processorOptions: {capacity: number, most: number, cushion: number}}} options in samples */
  constructor({ processorOptions: { capacity, most, cushion } }) {
    super();
    this.#most = most;
    this.#ring = new Float32Array(capacity);
    this.#cushion = cushion;
    this.port.onmessage = (/** @type {MessageEvent} */ { data }) => {
      if (data.type === "play") this.#take(data.samples);
      else if (data.type === "flush") this.#flush(data.id, data.fade);
    };
  }

  /** @param {Float32Array} samples */
  #take(samples) {
    if (this.#held === 0) this.#wait = this.#cushion;
    if (this.#held + samples.length > this.#ring.length) this.#grow(this.#held + samples.length);
    const count = Math.min(samples.length, this.#ring.length - this.#held);
    const at = (this.#read + this.#held) % this.#ring.length;
    const first = Math.min(count, this.#ring.length - at);
    this.#ring.set(samples.subarray(0, first), at);
    this.#ring.set(samples.subarray(first, count), 0);
    this.#held += count;
    if (count < samples.length) this.port.postMessage({ type: "full", lost: samples.length - count });
  }

  /** Make the ring larger, at least twice, but for its bound. @param {number} wanted */
  #grow(wanted) {
    const ring = new Float32Array(Math.min(this.#most, Math.max(wanted, 2 * this.#ring.length)));
    for (let i = 0; i < this.#held; i++) ring[i] = this.#ring[(this.#read + i) % this.#ring.length];
    [this.#ring, this.#read] = [ring, 0];
  }

  /** @param {number} id @param {number} fade */
  #flush(id, fade) {
    if (this.#fade) this.#told(this.#fade);
    const total = this.#wait > 0 ? 0 : Math.min(fade, this.#held);
    const cut = Float32Array.from(
      { length: this.#held - total },
      (_, i) => this.#ring[(this.#read + total + i) % this.#ring.length],
    );
    this.#held = total;
    this.#fade = { id, left: total, total, cut };
    if (total === 0) this.#told(this.#fade);
  }

  /** @param {{id: number, cut: Float32Array}} fade */
  #told({ id, cut }) {
    this.port.postMessage({ type: "flushed", id, cut, played: this.#played }, [cut.buffer]);
    this.#fade = null;
  }

  /** @param {unknown} _ @param {Float32Array[][]} outputs */
  process(_, [[out]]) {
    for (let i = 0; i < out.length; i++) {
      out[i] = this.#next();
      this.#power += out[i] * out[i];
      if (++this.#samples % this.#frame === 0) this.#measure();
    }
    this.#sinceReport += out.length;
    const isDue = this.#held === 0 || this.#sinceReport >= sampleRate / REPORTS_PER_S;
    if (isDue && this.#played !== this.#reported) this.#report();
    return true;
  }

  #measure() {
    this.#levels.push(Math.sqrt(this.#power / this.#frame));
    if (this.#levels.length > LEVELS_MAX) this.#levels.shift();
    this.#power = 0;
  }

  #next() {
    if (this.#held === 0) return 0;
    if (this.#wait > 0) {
      this.#wait -= 1; // a sound that comes late must find something that still plays
      return 0;
    }
    let sample = this.#ring[this.#read];
    this.#read = (this.#read + 1) % this.#ring.length;
    this.#held -= 1;
    this.#played += 1;
    if (this.#fade) {
      sample *= this.#fade.left / this.#fade.total;
      this.#fade.left -= 1;
      if (this.#fade.left === 0) this.#told(this.#fade);
    }
    this.#peak = Math.max(this.#peak, Math.abs(sample));
    return sample;
  }

  #report() {
    const levels = this.#levels.splice(0);
    const frame = Math.floor(this.#samples / this.#frame) - levels.length;
    const told = { played: this.#played, queued: this.#held, peak: this.#peak };
    this.port.postMessage({ type: "played", ...told, levels, frame });
    this.#sinceReport = 0;
    this.#peak = 0;
    this.#reported = this.#played;
  }
}

/**
 * Changes the rate of a stream of samples: windowed sinc, 16 zero crossings to either side. It takes
 * blocks of any size; frequencies that the lower of both rates cannot hold are taken out.
 */
export class Resampler {
  #step;
  #reach;
  /** @type {Float32Array[]} */ #kernels = [];
  #waiting;
  #position = 0;

  /** @param {number} from rate of the samples that come, in Hz @param {number} to rate of those that go */
  constructor(from, to) {
    this.#step = from / to;
    const cutoff = ROLLOFF * Math.min(1, to / from);
    this.#reach = Math.ceil(CROSSINGS / cutoff);
    for (let phase = 0; phase <= PHASES; phase++)
      this.#kernels.push(kernel(phase / PHASES, this.#reach, cutoff));
    this.#waiting = new Float32Array(this.#reach); // silence before the first sample
    this.#position = this.#reach;
  }

  /** @param {Float32Array} samples @returns {Float32Array} what these make possible */
  push(samples) {
    const joined = new Float32Array(this.#waiting.length + samples.length);
    joined.set(this.#waiting);
    joined.set(samples, this.#waiting.length);
    const last = joined.length - this.#reach - 1;
    const count = Math.max(0, Math.floor((last - this.#position) / this.#step) + 1);
    const made = new Float32Array(count);
    for (let i = 0; i < count; i++, this.#position += this.#step) made[i] = this.#at(joined, this.#position);
    const done = Math.min(Math.max(0, Math.floor(this.#position) - this.#reach), joined.length);
    this.#waiting = joined.slice(done);
    this.#position -= done;
    return made;
  }

  /** @param {Float32Array} samples @param {number} position */
  #at(samples, position) {
    const whole = Math.floor(position);
    const taps = this.#kernels[Math.round((position - whole) * PHASES)];
    let sum = 0;
    for (let tap = 0, from = whole - this.#reach + 1; tap < taps.length; tap++)
      sum += taps[tap] * samples[from + tap];
    return sum;
  }
}

/** @param {number} fraction of the place behind a sample @param {number} reach in samples @param {number} cutoff */
function kernel(fraction, reach, cutoff) {
  const taps = new Float32Array(2 * reach);
  let sum = 0;
  for (let tap = 0; tap < taps.length; tap++) {
    const away = tap - reach + 1 - fraction;
    const angle = Math.PI * away * cutoff;
    const window = 0.5 + 0.5 * Math.cos((Math.PI * away) / reach);
    taps[tap] = Math.abs(away) > reach ? 0 : (angle === 0 ? 1 : Math.sin(angle) / angle) * window;
    sum += taps[tap];
  }
  return taps.map((weight) => weight / sum); // silence in, silence out; a constant stays one
}

registerProcessor?.("antiphon-microphone", MicrophoneProcessor);
registerProcessor?.("antiphon-speaker", SpeakerProcessor);
