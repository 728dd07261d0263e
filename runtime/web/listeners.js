/**
 * Two small parts of a conversation: events with listeners, and a clock of when its user last spoke.
 */

/** The level below which sound is silence in any room. */
const SILENCE = 0.012;
/** Speech is so much louder than the room. */
const OVER_NOISE = 4;
/** The room's noise is followed upwards slowly, in blocks of 20 ms: speech must not become noise. */
const NOISE_RISE = 1.004;
const NOISE_MAX = 0.05;

/**
 * Events by name, with their listeners.
 * @template {Record<string, any> | object} Events
 */
export class Emitter {
  /** @type {Map<keyof Events, Set<(event: any) => void>>} */ #listeners = new Map();

  /**
   * Listen to one kind of event.
   * @template {keyof Events} Name
   * @param {Name} name
   * @param {(event: Events[Name]) => void} listener
   * @returns {() => void} listens no longer
   */
  on(name, listener) {
    const listeners = this.#listeners.get(name) ?? new Set();
    this.#listeners.set(name, listeners.add(listener));
    return () => void listeners.delete(listener);
  }

  /**
   * Tell the listeners; one that throws is reported to the console, and keeps nothing from the others.
   * @template {keyof Events} Name
   * @param {Name} name
   * @param {Events[Name]} event
   * @protected
   */
  emit(name, event) {
    for (const listener of this.#listeners.get(name) ?? []) {
      try {
        listener(event);
      } catch (error) {
        console.error(error);
      }
    }
  }
}

/** Knows when the user spoke last, by loudness: good enough for a measure on a page, not for a decision. */
export class VoiceClock {
  #noise = SILENCE / OVER_NOISE;
  /** @type {number | null} */ #spokeAt = null;

  /** @param {Float32Array} samples a block of the microphone */
  hear(samples) {
    let sum = 0;
    for (const sample of samples) sum += sample * sample;
    const level = Math.sqrt(sum / samples.length);
    if (level > Math.max(SILENCE, OVER_NOISE * this.#noise)) this.#spokeAt = performance.now();
    this.#noise = Math.min(NOISE_MAX, level, this.#noise * NOISE_RISE) || this.#noise;
  }

  /** @returns {number | null} milliseconds since the user spoke; null before */
  sinceMs() {
    return this.#spokeAt === null ? null : performance.now() - this.#spokeAt;
  }
}
