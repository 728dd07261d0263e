/**
 * Whether the microphone hears the loudspeaker: the normalized cross-correlation of how loud both are.
 *
 *     const meter = new EchoMeter(({ correlation, delayMs, isHeard }) => ...);
 *     meter.play(levels, frame);  // of the loudspeaker, in frames of 20 ms
 *     meter.hear(samples);        // of the microphone, 16 kHz
 *
 * Rules: levels in dB are compared, less their mean over 0.4 s: two people who speak at the same time
 * begin and end together, but their syllables do not. Only frames in which the loudspeaker sounds count.
 * Four seconds of these are judged together, and a new judgement comes every two seconds. Unless the echo is
 * clear, it must be found twice in a row. `docs/console.md` has the cases by which the limits were chosen.
 */

const FRAME_MS = 20;
const FRAME_SAMPLES = 320;
/** Delays from 0 to 600 ms: a loudspeaker by Bluetooth takes 300. */
const LAGS = 31;
/** To either side of a frame, of the mean that is taken off. */
const REACH = 10;
/** What is quieter than -60 dB is silence. */
const FLOOR = 0.001;
/** Louder than this, in dB, the loudspeaker plays. */
const PLAYS_DB = -48;
/** Frames that are judged together; the later half of them is judged again. */
const JUDGED = 200;
const LIMIT = 0.5;
/** One judgement is enough. */
const CLEAR = 0.7;
/** What the microphone's level must move at least, in dB for each dB of the loudspeaker: less is lost in noise. */
const MOVES = 0.1;
/** The clocks of both are compared by so many messages, and by as many before: a few seconds. */
const ARRIVALS = 100;
/** Frames that are kept, 20 s: the last ones of what was said are compared when the loudspeaker plays again. */
const KEPT = 1024;

/**
 * @typedef {{correlation: number, delayMs: number, isHeard: boolean}} EchoEvent the highest correlation of all
 *   delays, 0 to 1; `isHeard`: it is clear, or was found twice in a row, until it is not found twice in a row
 */

export class EchoMeter {
  #tell;
  #played = new Track();
  #heard = new Track();
  /** The loudspeaker's frame that is compared next. */
  #next = 0;
  #sum = 0;
  #count = 0;
  /** The last ones that are compared. @type {{played: number, heard: number[]}[]} */ #frames = [];
  /** Whether the last judgement found an echo. */
  #wasFound = false;
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
      const heard = Array.from({ length: LAGS }, (_, lag) => this.#heard.at(at + lag));
      this.#frames.push({ played: this.#played.at(this.#next), heard });
      if (this.#frames.length < JUDGED) continue;
      this.#judge();
      this.#frames.splice(0, JUDGED / 2);
    }
  }

  #judge() {
    const { correlation, lag, moves } = correlate(this.#frames);
    const isFound = correlation >= LIMIT && moves >= MOVES;
    if (isFound && (this.#wasFound || correlation >= CLEAR)) this.#isHeard = true;
    else if (!isFound && !this.#wasFound) this.#isHeard = false;
    this.#wasFound = isFound;
    this.#tell({ correlation, delayMs: lag * FRAME_MS, isHeard: this.#isHeard });
  }
}

/** The last seconds of one voice, frame by frame, and when its first frame was. */
class Track {
  /** Frames so far. */
  end = 0;
  #loudness = new Float32Array(KEPT);
  #change = new Float32Array(KEPT);
  /** The earliest that the first frame can have been, by the frames of now and of before. */
  #beganAt = [Infinity, Infinity];
  #arrivals = 0;

  /** @param {number} frame its number; those that are left out were silent @param {number} level 0 to 1 */
  put(frame, level) {
    this.end = Math.max(this.end, frame - KEPT);
    for (; this.end <= frame; this.end++) {
      this.#loudness[this.end % KEPT] = 20 * Math.log10((this.end === frame ? level : 0) + FLOOR);
      const middle = this.end - REACH;
      if (middle < REACH) continue;
      let sum = 0;
      for (let i = middle - REACH; i <= this.end; i++) sum += this.#loudness[i % KEPT];
      this.#change[middle % KEPT] = this.#loudness[middle % KEPT] - sum / (2 * REACH + 1);
    }
  }

  /** Frames come late by turns, and none comes early; the two clocks drift apart. @param {number} now */
  arrived(now) {
    if (++this.#arrivals % ARRIVALS === 0) this.#beganAt = [Infinity, this.#beganAt[0]];
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

  /** Whether it sounds. @param {number} frame */
  plays(frame) {
    return this.#loudness[frame % KEPT] > PLAYS_DB;
  }
}

/**
 * Correlate both voices at each delay.
 * @param {{played: number, heard: number[]}[]} frames @returns the highest correlation, its delay, and the slope there
 */
function correlate(frames) {
  const played = centred(frames.map((frame) => frame.played));
  const spread = dot(played, played);
  let best = { correlation: 0, lag: 0, moves: 0 };
  for (let lag = 0; lag < LAGS; lag++) {
    const heard = centred(frames.map((frame) => frame.heard[lag]));
    const [shared, both] = [dot(played, heard), Math.sqrt(spread * dot(heard, heard))];
    const correlation = both > 1e-3 ? shared / both : 0; // else one is silent
    if (correlation > best.correlation) best = { correlation, lag, moves: shared / spread };
  }
  return best;
}

/** @param {number[]} values @returns {number[]} less their mean */
function centred(values) {
  const mean = values.reduce((sum, value) => sum + value) / values.length;
  return values.map((value) => value - mean);
}

/** @param {number[]} one @param {number[]} other */
const dot = (one, other) => one.reduce((sum, value, i) => sum + value * other[i], 0);
