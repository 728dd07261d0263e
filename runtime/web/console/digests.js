// What was said in recordings, and their measures: read by the server, one recording after the other.

import { ApiError, askJson } from "./api.js";

const KEPT_MAX = 500;
const BUSY_MS = 1000;

/**
 * @typedef {{said: {voice: "user" | "model", at_ms: number, text: string}[], measures: Record<string, number>}} Digest
 */

/** Asks for digests in order, and keeps them until the page is closed. */
export class Digests {
  /** @type {Map<string, Digest>} */ #kept = new Map();
  /** @type {Promise<unknown>} */ #last = Promise.resolve();
  /** The one that is being read. @type {Promise<unknown>} */ reading = Promise.resolve();

  /**
   * The digest of a recording; null if the server cannot make one, or no caller `wants` it any more.
   * @param {any} recording @param {() => boolean} wants asked when its turn has come
   * @returns {Promise<Digest | null>}
   */
  of(recording, wants = () => true) {
    const name = `${recording.recording_id} ${recording.file_bytes}`;
    const known = this.#kept.get(name);
    if (known) return Promise.resolve(known);
    const made = this.#last.then(() => {
      const asked = wants() ? this.#ask(recording.recording_id, name) : Promise.resolve(null);
      this.reading = asked;
      return asked;
    });
    this.#last = made;
    return made;
  }

  /** @param {string} id @param {string} name @returns {Promise<Digest | null>} */
  async #ask(id, name) {
    const known = this.#kept.get(name);
    if (known) return known;
    const digest = await readDigest(`/api/recordings/${encodeURIComponent(id)}/digest`).catch(() => null);
    if (!digest) return null;
    this.#kept.set(name, digest);
    if (this.#kept.size > KEPT_MAX) this.#kept.delete(/** @type {string} */ (this.#kept.keys().next().value));
    return digest;
  }
}

/** Ask for a digest, again while the server reads another's. @param {string} path @returns {Promise<any>} */
export async function readDigest(path) {
  for (;;) {
    try {
      return await askJson(path);
    } catch (error) {
      if (/** @type {ApiError} */ (error).status !== 503) throw error;
      await new Promise((resolve) => setTimeout(resolve, BUSY_MS));
    }
  }
}

const PREVIEW_CHARS = 90;

/** The first words of a session, the user's and the model's. @param {Digest} digest */
export function firstWords({ said }) {
  const text = said.slice(0, 4).map(({ text }) => text.trim()).join(" – ");
  return text.length > PREVIEW_CHARS ? `${text.slice(0, PREVIEW_CHARS)}…` : text;
}

/** A text in a session's words, with some around it; empty if it is not there. @param {Digest} digest @param {string} wanted */
export function passageWith({ said }, wanted) {
  const text = wanted.toLowerCase();
  const found = said.find((it) => it.text.toLowerCase().includes(text));
  if (!found) return null;
  const at = found.text.toLowerCase().indexOf(text);
  const begin = Math.max(0, at - 40);
  const end = at + text.length + 50;
  const words = found.text.slice(begin, end).trim();
  return { atMs: found.at_ms, text: `${begin ? "…" : ""}${words}${end < found.text.length ? "…" : ""}` };
}
