/**
 * Whether the microphone hears the loudspeaker: the normalized cross-correlation of how loud both are.
 *
 *     const meter = new EchoMeter(({ correlation, delayMs, isHeard }) => ...);
 *     meter.play(levels, frame);  // of the loudspeaker, in frames of 20 ms
 *     meter.hear(samples);        // of the microphone, 16 kHz
 *
 * Rules: levels in dB are compared, less their mean over 0.4 s: two people who speak at the same time
 * begin and end together, but their syllables do not. Only frames in which the loudspeaker plays count.
 * Four seconds of these are judged together, and a new judgement comes every two seconds. One that is not
 * clear must find the same delay as the one before. `docs/console.md` has the cases by which the limits were
 * chosen.
 */

const FRAME_MS = 20;
const FRAME_SAMPLES = 320;
/** Delays from 0 to 600 ms: a loudspeaker by Bluetooth takes 300. */
const LAGS = 31;
/** To either side of a frame, of the mean that is taken off. */
const REACH = 10;
/** What is quieter than -60 dB is silence. */
const FLOOR = 0.001;
/** Louder than -50 dB, the loudspeaker plays. */
const PLAYS = 0.003;
/** A pause within speech belongs to it. */
const PAUSE = 10;
/** A judgement's frames: those of this batch, and of the one before. */
const BATCH = 100;
const LIMIT = 0.5;
/** One judgement is enough. */
const CLEAR = 0.65;
/** What the microphone's level must move at least, in dB for each dB of the loudspeaker: less is lost in noise. */
const MOVES = 0.05;
/** The same delay, but for a frame of each of both clocks. */
const SAME = 2;
/** Frames that are kept, 20 s: the last ones of what was said are compared when the loudspeaker plays again. */
const KEPT = 1024;

/**
 * @typedef {{correlation: number, delayMs: number, isHeard: boolean}} EchoEvent the highest correlation of all
 *   delays, 0 to 1; `isHeard`: it is clear, or two in a row agree, until two in a row do not
 */

export class EchoMeter {
  #tell;
  #played = new Track();
  #heard = new Track();
  /** The loudspeaker's frame that is compared next. */
  #next = 0;
  #sum = 0;
  #count = 0;
  #batch = new Batch();
  #before = new Batch();
  /** The delay of the last judgement, in frames; null: it found none. @type {number | null} */ #lag = null;
  #isHeard = false;

  /** @param {(echo: EchoEvent) => void} tell */
  constructor(tell) {
    this.#tell = tell;
  }

  /** @param {ArrayLike<number>} levels of played frames, 0 to 1 @param {number} frame the first one's number */
  play(levels, frame, now = performance.now()) {
    for (let i = 0; i < levels.length; i++) this.#played.put(frame + i, levels[i]);
    this.#played.arrived(now);
  }

  /** @param {Float32Array} samples of the microphone, of any number */
  hear(samples, now = performance.now()) {
    for (const sample of samples) {
      this.#sum += sample * sample;
      if (++this.#count < FRAME_SAMPLES) continue;
      this.#heard.put(this.#heard.end, Math.sqrt(this.#sum / FRAME_SAMPLES));
      [this.#sum, this.#count] = [0, 0];
    }
    this.#heard.arrived(now);
    this.#compare();
  }

  #compare() {
    const ahead = Math.round((this.#played.beganAt - this.#heard.beganAt) / FRAME_MS);
    for (; this.#next < this.#played.done; this.#next++) {
      const at = this.#next + ahead;
      if (at + LAGS > this.#heard.done) return;
      if (at < this.#heard.first || this.#next < this.#played.first || !this.#played.plays(this.#next)) continue;
      this.#batch.add(this.#played.at(this.#next), (lag) => this.#heard.at(at + lag));
      if (this.#batch.count < BATCH) continue;
      if (this.#before.count) this.#judge();
      [this.#before, this.#batch] = [this.#batch, new Batch()];
    }
  }

  #judge() {
    const { correlation, lag, moves } = this.#batch.best(this.#before);
    const found = correlation < LIMIT || moves < MOVES ? null : lag;
    const isSame = found !== null && this.#lag !== null && Math.abs(found - this.#lag) <= SAME;
    if (isSame || (found !== null && correlation >= CLEAR)) this.#isHeard = true;
    else if (found === null && this.#lag === null) this.#isHeard = false;
    this.#lag = found;
    this.#tell({ correlation, delayMs: lag * FRAME_MS, isHeard: this.#isHeard });
  }
}

/** The last seconds of one voice, frame by frame, and when its first frame was. */
class Track {
  /** Frames so far. */
  end = 0;
  #levels = new Float32Array(KEPT);
  #loudness = new Float32Array(KEPT);
  #change = new Float32Array(KEPT);
  /** The earliest that the first frame can have been, by the frames of now and of before. */
  #beganAt = [Infinity, Infinity];
  #arrivals = 0;

  /** @param {number} frame its number; those that are left out were silent @param {number} level 0 to 1 */
  put(frame, level) {
    this.end = Math.max(this.end, frame - KEPT);
    for (; this.end <= frame; this.end++) {
      const now = this.end === frame ? level : 0;
      this.#levels[this.end % KEPT] = now;
      this.#loudness[this.end % KEPT] = 20 * Math.log10(now + FLOOR);
      const middle = this.end - REACH;
      if (middle < REACH) continue;
      let sum = 0;
      for (let i = middle - REACH; i <= this.end; i++) sum += this.#loudness[i % KEPT];
      this.#change[middle % KEPT] = this.#loudness[middle % KEPT] - sum / (2 * REACH + 1);
    }
  }

  /** Frames come late by turns, and none comes early; the two clocks drift apart. @param {number} now */
  arrived(now) {
    if (++this.#arrivals % BATCH === 0) this.#beganAt = [Infinity, this.#beganAt[0]];
    this.#beganAt[0] = Math.min(this.#beganAt[0], now - this.end * FRAME_MS);
  }

  get beganAt() {
    return Math.min(...this.#beganAt);
  }

  /** The first frame that `at` still knows, and the one after the last. */
  get first() {
    return Math.max(REACH, this.end - KEPT + 1);
  }

  get done() {
    return this.end - REACH;
  }

  /** @param {number} frame */
  at(frame) {
    return this.#change[frame % KEPT];
  }

  /** Whether it sounds in this frame, or did shortly before. @param {number} frame */
  plays(frame) {
    for (let i = Math.max(0, frame - PAUSE); i <= frame; i++) if (this.#levels[i % KEPT] > PLAYS) return true;
    return false;
  }
}

/** Sums of which a correlation is made, for each delay. */
class Batch {
  count = 0;
  #x = 0;
  #xx = 0;
  #y = new Float64Array(LAGS);
  #yy = new Float64Array(LAGS);
  #xy = new Float64Array(LAGS);

  /** @param {number} x @param {(lag: number) => number} heard */
  add(x, heard) {
    this.count += 1;
    this.#x += x;
    this.#xx += x * x;
    for (let lag = 0; lag < LAGS; lag++) {
      const y = heard(lag);
      this.#y[lag] += y;
      this.#yy[lag] += y * y;
      this.#xy[lag] += x * y;
    }
  }

  /** The highest correlation of both together, its delay, and the slope. @param {Batch} other */
  best(other) {
    const count = this.count + other.count;
    const x = this.#x + other.#x;
    const spread = this.#xx + other.#xx - (x * x) / count;
    let best = { correlation: 0, lag: 0, moves: 0 };
    for (let lag = 0; lag < LAGS; lag++) {
      const y = this.#y[lag] + other.#y[lag];
      const both = spread * (this.#yy[lag] + other.#yy[lag] - (y * y) / count);
      const shared = this.#xy[lag] + other.#xy[lag] - (x * y) / count;
      const correlation = both > 1e-6 ? shared / Math.sqrt(both) : 0;
      if (correlation > best.correlation) best = { correlation, lag, moves: shared / spread };
    }
    return best;
  }
}
