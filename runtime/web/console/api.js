// The server's HTTP API, with a client secret in place of the key that its user gave.

const KEY = "antiphon.key";

/** An answer that is an error, or none. `status` 0: the server does not answer. */
export class ApiError extends Error {
  /** @param {number} status @param {string} message */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The client secret of this tab; empty without one. It lasts two hours, or until the tab is closed. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  /** @param {string} value */
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** The address for WebSockets. */
export const url = `${location.protocol === "https:" ? "wss:" : "ws:"}//${location.host}`;

/** What `connect` takes in addition. */
export const connection = () => (key.get() ? { key: key.get() } : {});

/**
 * Ask the server.
 * @param {string} path @param {RequestInit} [options]
 * @returns {Promise<Response>} an answer that is not an error
 */
export async function ask(path, options = {}) {
  const headers = { ...(key.get() ? { Authorization: `Bearer ${key.get()}` } : {}), ...options.headers };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers, cache: "no-store" });
  } catch {
    throw new ApiError(0, "The server does not answer.");
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new ApiError(answer.status, sentence(said?.message ?? answer.statusText));
}

/** Ask for JSON. @param {string} path @param {RequestInit} [options] @returns {Promise<any>} */
export const askJson = async (path, options) => (await ask(path, options)).json();

/**
 * Save what is at a path as a file.
 * @param {string} path @param {string} name @param {(share: number) => void} [onShare] is told how much of it is here
 */
export async function save(path, name, onShare = () => {}) {
  const answer = await ask(path);
  const whole = Number(answer.headers.get("content-length"));
  let bytes = 0;
  const counted = new TransformStream({
    transform(/** @type {Uint8Array} */ piece, to) {
      bytes += piece.length;
      if (whole) onShare(bytes / whole);
      to.enqueue(piece);
    },
  });
  const body = new Response(answer.body?.pipeThrough(counted));
  const address = URL.createObjectURL(await body.blob());
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** The server's messages begin in lower case, and have no full stop. @param {string} text */
export function sentence(text) {
  if (!text) return "";
  const begun = text[0].toUpperCase() + text.slice(1);
  return /[.!?]$/.test(begun) ? begun : `${begun}.`;
}
