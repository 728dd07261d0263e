/* Plays both voices together, from any place.
 *
 * Sound is decoded a piece at a time, when playing comes near it, and handed to the browser's audio
 * clock ahead of time; so what is heard is exact, whatever the page is busy with. Without sound the
 * clock runs all the same.
 */

import { bytesOf } from "./data.js";
import { stretched } from "./stretch.js";

const AHEAD_S = 8;
const LOOK_MS = 1000;
const DECODED_MAX = 10;
const START_S = 0.05;

export class Player {
  /** `changed` is called when playing begins, ends or is moved. */
  constructor(session, changed) {
    this.end = session.end;
    this.pieces = [...session.sounds.user, ...session.sounds.model];
    this.changed = changed;
    this.muted = { user: false, model: false };
    this.playing = false;
    this.failed = null;
    this.at = 0;
    this.speed = 1;
    this.until = null;
    this.context = null;
    this.gains = {};
    this.sources = new Map();
    this.decoded = new Map();
    this.run = 0;
  }

  /** Where in the session playing is, in seconds. */
  get position() {
    if (!this.playing) return this.at;
    const played = Math.max(0, this.context.currentTime - this.started);
    return Math.min(this.limit, this.at + this.speed * played);
  }

  /** Where playing stops: at the end of the part that is played, or of the session. */
  get limit() {
    return this.until ?? this.end;
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  /** Begin, from the start where it had come to the end. */
  async play() {
    if (this.playing) return;
    this.open();
    if (this.at >= this.limit - 0.01) this.at = 0;
    await this.context.resume();
    if (this.playing) return;
    this.playing = true;
    this.started = this.context.currentTime + START_S;
    this.run += 1;
    this.timer = setInterval(() => this.look(), LOOK_MS);
    this.look();
    this.changed();
  }

  pause() {
    if (!this.playing) return;
    this.at = this.position;
    this.playing = false;
    this.until = null;
    clearInterval(this.timer);
    this.silence();
    this.changed();
  }

  /** Play a part, and stop at its end. */
  playPart({ begin, end }) {
    this.pause();
    this.seek(begin);
    this.until = end;
    return this.play();
  }

  /** Play slower or faster, at the same pitch, from where it is. */
  setSpeed(speed) {
    const { until, position } = this;
    this.speed = speed;
    this.decoded.clear();
    this.seek(position);
    this.until = until;
  }

  /** Go to a place, playing or not. */
  seek(time) {
    const wasPlaying = this.playing;
    this.until = null;
    this.at = Math.min(this.end, Math.max(0, time));
    if (wasPlaying) {
      this.silence();
      this.run += 1;
      this.started = this.context.currentTime + START_S;
      this.look();
    }
    this.changed();
  }

  mute(voice, isMuted) {
    this.muted[voice] = isMuted;
    const gain = this.gains[voice];
    if (gain) gain.gain.setTargetAtTime(isMuted ? 0 : 1, this.context.currentTime, 0.01);
    this.changed();
  }

  open() {
    if (this.context !== null) return;
    this.context = new AudioContext();
    for (const voice of ["user", "model"]) {
      const gain = this.context.createGain();
      gain.gain.value = this.muted[voice] ? 0 : 1;
      gain.connect(this.context.destination);
      this.gains[voice] = gain;
    }
  }

  silence() {
    for (const source of this.sources.values()) source?.stop();
    this.sources.clear();
  }

  /** Schedule what will be heard soon, and end at the end. */
  look() {
    const now = this.position;
    if (now >= this.limit) {
      this.pause();
      return;
    }
    for (const piece of this.pieces) {
      if (piece.end > now && piece.begin < now + AHEAD_S && !this.sources.has(piece)) {
        this.sources.set(piece, null);
        this.schedule(piece, this.run);
      }
    }
  }

  async schedule(piece, run) {
    let buffer;
    try {
      buffer = await this.decode(piece);
    } catch (error) {
      const at = piece.begin.toFixed(1);
      this.failed = `the sound at ${at} s cannot be decoded: ${error.message}`;
      this.changed();
      return;
    }
    if (!this.playing || this.run !== run) return;
    const { speed } = this;
    const begins = this.started + (piece.begin - this.at) / speed;
    const late = Math.max(0, this.context.currentTime - begins);
    const length = (Math.min(piece.end, this.limit) - piece.begin) / speed - late;
    if (length <= 0) return;
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.gains[piece.voice]);
    source.start(begins + late, piece.lead / speed + late, length);
    this.sources.set(piece, source);
  }

  /** The samples of a piece at this speed; the last few that were asked for are kept. */
  decode(piece) {
    const known = this.decoded.get(piece);
    this.decoded.delete(piece);
    const found = known ?? this.samplesOf(piece);
    this.decoded.set(piece, found);
    if (this.decoded.size > DECODED_MAX) this.decoded.delete(this.decoded.keys().next().value);
    return found;
  }

  async samplesOf(piece) {
    const { speed } = this;
    const buffer = await this.context.decodeAudioData(bytesOf(piece.file).buffer);
    if (speed === 1) return buffer;
    const samples = stretched(buffer.getChannelData(0), buffer.sampleRate, speed);
    const made = this.context.createBuffer(1, Math.max(1, samples.length), buffer.sampleRate);
    made.copyToChannel(samples, 0);
    return made;
  }
}
