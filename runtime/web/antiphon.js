/**
 * Antiphon's client for browsers and Node, over a WebSocket, in one file: the protocols `realtime`,
 * `transcription` and `live`.
 *
 *     import { connect } from "./antiphon.js";
 *
 *     const session = await connect("ws://127.0.0.1:8006", { mode: "audio", instructions: "Be brief." });
 *     microphone.onSamples = (samples) => session.append(samples);     // Float32Array, 16 kHz mono
 *     for await (const event of session) {
 *       if (event.type === "speech") play(event.audio);                // Float32Array, 24 kHz mono
 *     }
 *
 *     const chat = await connect("ws://127.0.0.1:8006", { mode: "chat" });
 *     for await (const piece of await chat.ask("Good morning!")) show(piece.text);
 *
 *     const dictation = await connect("ws://127.0.0.1:8006", { mode: "transcription" });
 *     microphone.onSamples = (samples) => dictation.append(samples);
 *     button.onclick = () => dictation.finish();                       // that was the utterance
 *     for await (const event of dictation) if (event.type === "delta") show(event.text);
 *
 * Rules: events go to the iterator, or, where `onEvent` is given, to that only; it needs `onEnd`,
 * which is told how the session ended. Sound is cut into whole seconds; a rest waits for more, or for
 * `flush`; sound to be transcribed goes out as it comes, for the server cuts it. `connect` tries
 * again, with growing waits, until the server has created the session. A connection that is lost after
 * that is made again, and the session goes on where the server lets it (`resume`). Settings
 * within `config`, `generation` and `speech` bear the names that they have on the wire. With `dialect:
 * "live"` and a `model` a session of mode `audio` speaks OpenAI's Live API, at its addresses: a second's
 * text and its sound are two `speech`.
 *
 * It records no microphone, plays nothing, keeps no history of a chat and knows no other dialect.
 * Node before 22 has no WebSocket by itself: give one as `WebSocket`.
 */

const UNIT_SAMPLES = 16_000;
/** The shortest append that a server takes: 250 ms. */
const APPEND_SAMPLES_MIN = 4_000;
const FRAMES_MAX = 4;
/** Ten seconds of a transcription: far below what a server takes, and large enough to cost little. */
const APPEND_SAMPLES_MAX = 160_000;
const PCM16_MAX = 32_767;
/** An hour of a duplex session without a reader: more would only cost memory. */
const EVENTS_WAITING_MAX = 4_096;
/** Half a minute of sound and pictures that the network does not take: it will not catch up. */
const UNSENT_BYTES_MAX = 32 * 1024 * 1024;
const BACKOFF_MS = 500;
const BACKOFF_MS_MAX = 30_000;
const CLOSE_WAIT_MS = 10_000;
/** Messages that the server has not acknowledged: eight minutes of sound; older ones are let go. */
const KEPT_BYTES_MAX = 32 * 1024 * 1024;
/** Of what a tool returned, in characters: a server takes no more. */
const RESULT_CHARS_MAX = 4_096;
/** For the first frame of a connection that comes back: a server answers at once. */
const GREETING_MS = 10_000;
/** Refusals: an `error`, then a close with 1013. */
const REFUSALS = ["service_unavailable", "queue_full", "worker_busy", "worker_connect_failed"];
/** All that `live` says of a place in the queue is its `message`. */
const NOWHERE = { position: 0, estimated_wait_s: 0, ticket_id: "", queue_length: 0 };
/** What a server without the model says, in place of the utterance. */
const MODEL_ERRORS = ["model_not_found", "model_not_validated"];
/** Going away, lost, failed, restarting, full, a gateway without its server: these may pass. */
const PASSING_CLOSE_CODES = [1001, 1006, 1011, 1012, 1013, 1014];

/**
 * @typedef {{position: number, estimated_wait_s: number, ticket_id: string, queue_length: number,
 *   message?: string}} QueuePlace in `live` only the message tells it
 * @typedef {Record<string, number | string>} Metrics
 * @typedef {{type: "listen", inputId: string, metrics: Metrics}} ListenEvent
 * @typedef {{type: "speech", text: string, audio: Float32Array, endOfTurn: boolean,
 *   responseId: string, inputId: string, metrics: Metrics}} SpeechEvent
 * @typedef {{type: "error", code: string, message: string, sessionId: string}} ErrorEvent
 * @typedef {{type: "going_away", secondsLeft: number}} GoingAwayEvent the server will shut down
 * @typedef {{type: "words", text: string, startMs: number, endMs: number}} WordsEvent what the user said, where the server
 *   has a transcriber: words, or a part of one
 * @typedef {{type: "call", id: string, name: string, arguments: string, unit: number}} CallEvent the model calls a tool;
 *   `arguments`: a JSON object, as text
 * @typedef {{type: "closed", reason: string}} ClosedEvent
 * @typedef {ListenEvent | SpeechEvent | CallEvent | ErrorEvent | GoingAwayEvent | WordsEvent | ClosedEvent} SessionEvent
 * @typedef {(given: any, call: CallEvent) => unknown} ToolFunction takes the arguments, and returns text, or what JSON can
 *   hold, or a promise of that
 * @typedef {ToolFunction | {description?: string, parameters?: object, run?: ToolFunction}} Tool `parameters`: a JSON
 *   schema; without `run` the program answers its calls by `giveResult`
 * @typedef {{prompt_tokens: number, completion_tokens: number, total_tokens: number}} Usage
 * @typedef {{type: "delta", text: string} | ErrorEvent
 *   | {type: "done", text: string, usage: Usage}} TranscriptEvent `done` ends an utterance
 * @typedef {{type: "delta", text: string, audio: Float32Array}} Delta
 * @typedef {{type: "response", text: string, audio: Float32Array, reason: string,
 *   responseId: string, metrics: Metrics, toolCalls: ToolCall[]}} Response `toolCalls` are to be run, and
 *   their results sent with the next question
 * @typedef {{id: string, type: "function", function: {name: string, arguments: string}}} ToolCall
 * @typedef {{type: string, [field: string]: unknown}} Content `data` may be bytes or samples
 * @typedef {{role: "system" | "user" | "assistant" | "tool", content?: string | Content[] | null,
 *   tool_calls?: ToolCall[], tool_call_id?: string}} Message
 * @typedef {{sessionId: string, recording?: string, recordingId: string, recordingNotice: string,
 *   tools?: "called" | "not_called"}} Created `recordingId` and `recordingNotice` are empty where there is none; a
 *   transcription does not say `recording`; `tools`: whether the model calls those that it was offered
 * @typedef {{
 *   readyState: number, bufferedAmount: number, binaryType: any,
 *   send(data: string): void, close(code?: number, reason?: string): void,
 *   addEventListener(type: string, listener: (event: any) => void): void}} WebSocketLike
 * @typedef {{type: "reconnecting", attempt: number, waitMs: number}
 *   | {type: "reconnected", awayMs: number, skipped: number}} ConnectionEvent `skipped`: messages to the
 *   server that are lost, since more than may be kept had not arrived
 * @typedef {object} Options
 * @property {"audio" | "video" | "chat" | "transcription"} mode what the session carries
 * @property {"realtime" | "live"} [dialect] `live`: OpenAI's Live API, for mode `audio`, with `model` and
 *   without `config`, `voice`, `tools`, `fork`, `onSent`, `interrupt`, `acknowledge` and the reason of a close
 * @property {string} [model] of `live`, which needs it, and of a transcription: by a name that the server knows it by;
 *   without it a transcription takes the server's
 * @property {string} [instructions] the system prompt; in chat a message says it
 * @property {object} [config] inference settings, as on the wire
 * @property {{ref_audio_base64?: string, ref_audio_path?: string, tts_ref_audio_base64?: string}} [voice] as on the wire
 * @property {Record<string, Tool>} [tools] functions that the model of a duplex session may call, by name: they run
 *   while the session is read, and what they return goes back by itself. In chat each question has its own
 * @property {boolean} [record] false: the session is not to be recorded; a server that must refuses
 * @property {(place: QueuePlace) => void} [onQueue] is told each place in the queue
 * @property {(event: any) => void} [onEvent] is told what happens, instead of the iterator
 * @property {(error: Error | null) => void} [onEnd] needed with `onEvent`: the session is over; null: in
 *   order
 * @property {(inputId: string) => void} [onSent] of a duplex session: is told the name of each append that was
 *   sent; `listen` and `speech` bear the name of the append that they answer
 * @property {number} [retries] further attempts where one fails for a reason that may pass (4)
 * @property {boolean} [resume] false: a session whose connection is lost is over; otherwise it is resumed
 *   where the server can, and only `onConnection` reports it
 * @property {(event: ConnectionEvent) => void} [onConnection] is told when the connection is lost, and back
 * @property {{recording: string, unit?: number}} [fork] the session begins from the past of a recorded one of the
 *   same mode, before a unit or after its last; without `instructions`, `config` and `voice`, which stay as they are
 * @property {AbortSignal} [signal] gives up connecting, and waiting in the queue; `connect` throws its reason
 * @property {() => number} [random] gives numbers in [0, 1) that shorten the waits between attempts
 * @property {string} [key] the API key, where the server asks for one; letters, digits, - and _
 * @property {new (url: string, protocols?: string[]) => WebSocketLike} [WebSocket] instead of the global one
 */

/** The root of what goes wrong between a client and its server; the message is one line. */
export class AntiphonError extends Error {
  /** @param {string} message */
  constructor(message) {
    super(message);
    this.name = new.target.name;
  }
}

/** There is no answer at the address, or not that of a server; a browser does not say why, the message guesses. */
export class CannotConnectError extends AntiphonError {}

/** What was asked for is not possible now, or never is: a mistake of the calling code. */
export class MisuseError extends AntiphonError {}

/** The server broke the protocol. */
export class RemoteProtocolError extends AntiphonError {}

/** The server answered a request with an `error`; the session lives on. */
export class ReportedError extends AntiphonError {
  /** @param {{code: string, message: string, sessionId?: string}} error by `sessionId` an operator finds it */
  constructor({ code, message, sessionId = "" }) {
    super(`the server reported an error: ${message} (${code})`);
    this.code = code;
    this.sessionId = sessionId;
  }
}

/** The server has no place for the session. */
export class SessionRefusedError extends AntiphonError {
  /** @param {{code: string, message: string, sessionId?: string}} error by `sessionId` an operator finds it */
  constructor({ code, message, sessionId = "" }) {
    super(`the server refused the session: ${message} (${code})`);
    this.code = code;
    this.sessionId = sessionId;
  }
}

/** The connection is over: its close code and reason. */
export class SessionClosedError extends AntiphonError {
  /** @param {number} code @param {string} reason */
  constructor(code, reason) {
    const said = code === 1006 ? "connection lost" : `closed with code ${code}`;
    super(reason ? `${said}, ${reason}` : said);
    this.code = code;
    this.reason = reason;
  }
}

/**
 * Write bytes, or samples (little-endian, as all machines with a WebSocket have it), as base64.
 * @param {ArrayBuffer | ArrayBufferView} data
 * @returns {string}
 */
export function encodeBase64(data) {
  const bytes = ArrayBuffer.isView(data)
    ? new Uint8Array(data.buffer, data.byteOffset, data.byteLength)
    : new Uint8Array(data);
  const native = /** @type {any} */ (bytes);
  if (native.toBase64) return native.toBase64();
  const { Buffer } = /** @type {any} */ (globalThis);
  if (Buffer) return Buffer.from(bytes.buffer, bytes.byteOffset, bytes.byteLength).toString("base64");
  const pieces = [];
  for (let start = 0; start < bytes.length; start += 0x8000) {
    pieces.push(String.fromCharCode(.../** @type {any} */ (bytes.subarray(start, start + 0x8000))));
  }
  return btoa(pieces.join(""));
}

/**
 * Read base64.
 * @param {string} text
 * @returns {Uint8Array} with a buffer of its own
 */
export function decodeBase64(text) {
  const native = /** @type {any} */ (Uint8Array);
  if (native.fromBase64) return native.fromBase64(text);
  const { Buffer } = /** @type {any} */ (globalThis);
  if (Buffer) return new Uint8Array(Buffer.from(text, "base64"));
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** @param {unknown} text @returns {Float32Array} */
function decodeAudio(text) {
  return typeof text === "string" ? new Float32Array(decodeBase64(text).buffer) : new Float32Array(0);
}

/**
 * A session's WebSockets, one after the other: its messages wait for their reader.
 *
 * A server that lets a client come back greets each connection (`session.resumable`), and counts in
 * each frame its own (`seq`) and the client's messages (`ack`). What it does not have is kept here; a
 * lost connection is opened again, and what either side has not heard is sent again.
 */
class Channel {
  /** @type {any[]} */ #waiting = [];
  /** @type {(() => void) | null} */ #wake = null;
  /** @type {Error | null} */ #failure = null;
  /** @type {SessionRefusedError | null} */ #refusal = null;
  #isOver = false;
  isClosed = false;
  hasOpened = false;
  closeSent = false;
  #hasHungUp = false;
  code = 1006;
  reason = "";

  /** @type {{recordingId: string, token: string, expiresMs: number} | null} */ #wayBack = null;
  /** @type {{since: number, attempt: number, bytes: number, code: number, reason: string} | null} */
  #away = null;
  /** @type {ReturnType<typeof setTimeout> | undefined} */ #timer;
  /** @type {string[]} */ #kept = [];
  #keptBytes = 0;
  #acked = 0;
  #lastSeq = -1;

  /**
   * @param {(resume: string) => WebSocketLike} connectTo a new session, or one that is resumed
   * @param {{random: () => number, onConnection?: Options["onConnection"]}} options
   */
  constructor(connectTo, { random, onConnection }) {
    this.#connectTo = connectTo;
    this.#random = random;
    this.#onConnection = onConnection;
    /** @type {Promise<void>} */
    this.ended = new Promise((resolve) => (this.#onEnded = resolve));
    this.socket = this.#open();
  }
  #connectTo;
  #random;
  #onConnection;
  #onEnded = () => {};

  /** Open the next WebSocket. */
  #open() {
    const socket = this.#connectTo(this.#wayBack?.recordingId ?? "");
    let [isOpen, isOver] = [false, false];
    const end = (/** @type {number} */ code, /** @type {string} */ reason) => {
      if (isOver) return;
      isOver = true;
      this.#lose(code, reason);
    };
    socket.addEventListener("close", ({ code, reason }) => end(code, reason));
    // A close follows, but not in Node 20, where no connection was made.
    socket.addEventListener("error", () => isOpen || end(1006, ""));
    socket.addEventListener("open", () => {
      isOpen = this.hasOpened = true;
      if (!this.#away || !this.#wayBack || isOver) return;
      const { token } = this.#wayBack;
      socket.send(JSON.stringify({ type: "session.resume", token, last_seq: this.#lastSeq }));
    });
    socket.addEventListener("message", (event) => isOver || this.#take(event.data));
    if (this.#away) {
      this.#timer = setTimeout(() => (end(1006, "no answer"), socket.close()), GREETING_MS);
    }
    return socket;
  }

  /** The connection is over: come back, or end. @param {number} code @param {string} reason */
  #lose(code, reason) {
    clearTimeout(this.#timer);
    if (!this.#wayBack || !PASSING_CLOSE_CODES.includes(code)) {
      return this.#finish(this.#away ?? { code, reason });
    }
    this.#away ??= { since: performance.now(), attempt: 0, bytes: 0, code, reason };
    const waitMs = backoff(this.#away.attempt++, this.#random());
    if (performance.now() + waitMs - this.#away.since > this.#wayBack.expiresMs) {
      return this.#finish(this.#away);
    }
    this.#timer = setTimeout(() => (this.socket = this.#open()), waitMs);
    this.#onConnection?.({ type: "reconnecting", attempt: this.#away.attempt, waitMs });
  }

  /** @param {{code: number, reason: string}} close */
  #finish({ code, reason }) {
    if (this.isClosed) return;
    [this.isClosed, this.code, this.reason] = [true, code, reason];
    [this.#wayBack, this.#away, this.#kept] = [null, null, []];
    this.#notify();
    this.#onEnded();
  }

  /** Close the connection, and come back no more. @param {number} [code] */
  leave(code) {
    clearTimeout(this.#timer);
    this.#wayBack = null;
    if (this.#away) this.#finish(this.#away);
    this.socket.close(code);
  }

  /** @param {any} greeting */
  #greeted({ recording_id, token, expires_in_s, ack }) {
    this.#wayBack = token ? { recordingId: recording_id, token, expiresMs: expires_in_s * 1000 } : null;
    const away = this.#away;
    if (!away) return;
    clearTimeout(this.#timer);
    this.#away = null;
    const skipped = this.#acknowledge(ack);
    for (const text of this.#kept) this.socket.send(text);
    this.#onConnection?.({ type: "reconnected", awayMs: performance.now() - away.since, skipped });
  }

  /** @param {number} count of messages that the server has @returns {number} of those lost for ever */
  #acknowledge(count) {
    while (this.#kept.length && this.#acked < count) this.#letGo();
    return Math.max(0, this.#acked - count);
  }

  #letGo() {
    this.#keptBytes -= /** @type {string} */ (this.#kept.shift()).length;
    this.#acked += 1;
  }

  /** @param {string} text */
  #keep(text) {
    this.#kept.push(text);
    this.#keptBytes += text.length;
    while (this.#keptBytes > KEPT_BYTES_MAX && this.#kept.length > 1) this.#letGo();
  }

  /** @param {unknown} data */
  #take(data) {
    if (this.#failure) return;
    let event = null;
    try {
      event = JSON.parse(/** @type {string} */ (data));
    } catch {} // it is told below
    if (typeof event?.type !== "string") {
      return this.fail(new RemoteProtocolError("the server sent a message that is no event"));
    }
    if (event.type === "session.resumable") return this.#greeted(event);
    if (this.#away) return; // a server that is not up yet says so, and closes
    if (this.#wayBack && Number.isInteger(event.seq)) {
      this.#acknowledge(event.ack);
      if (event.seq <= this.#lastSeq) return;
      this.#lastSeq = event.seq;
    }
    const isRefusal = event.type === "error" && REFUSALS.includes(event.code ?? event.error?.code);
    if (isRefusal || ["session.replaced", "session.closed"].includes(event.type)) this.#wayBack = null;
    if (event.type === "session.replaced") return;
    if (typeof event.error === "string") {
      event.error = { code: event.code, message: event.error }; // as a transcription has it
    }
    if (event.type === "error" && event.error) event.error.sessionId = event.session_id ?? "";
    if (this.#waiting.push(event) > EVENTS_WAITING_MAX) {
      return this.fail(new MisuseError(`${EVENTS_WAITING_MAX} events wait, and none is read`));
    }
    this.#notify();
  }

  #notify() {
    this.#wake?.();
    this.#wake = null;
  }

  /** @param {Error} failure */
  fail(failure) {
    this.#failure ??= failure;
    this.leave();
    this.#notify();
  }

  /** @returns {Promise<any>} the next event; null after the last of a session that ended in order */
  async receive() {
    while (this.#waiting.length === 0) {
      if (this.#failure) throw this.#failure;
      if (this.isClosed) {
        if (this.#isOver || this.#hasHungUp) return null;
        throw this.#refusal ?? new SessionClosedError(this.code, this.reason);
      }
      await new Promise((resolve) => (this.#wake = () => resolve(undefined)));
    }
    const event = this.#waiting.shift();
    this.#isOver ||= event.type === "session.closed";
    if (event.type === "error" && REFUSALS.includes(event.error?.code)) {
      this.#refusal = new SessionRefusedError(event.error);
    }
    return event;
  }

  /** @param {object} message */
  send(message) {
    if (this.isClosed) throw new SessionClosedError(this.code, this.reason);
    if (this.#isOver) throw new SessionClosedError(1000, "the server has ended the session");
    if (this.closeSent) throw new MisuseError("nothing is sent after close()");
    const unsent = this.#away ? this.#away.bytes : this.socket.bufferedAmount;
    if (unsent > UNSENT_BYTES_MAX) throw new AntiphonError(`${unsent} bytes wait to be sent`);
    const text = JSON.stringify(message);
    if (this.#wayBack) this.#keep(text);
    if (this.#away) this.#away.bytes += text.length;
    else this.socket.send(text);
  }

  /** @param {string} [reason] @returns {Promise<void>} settled when the connection is closed */
  async close(reason) {
    if (!this.isClosed && !this.closeSent && !this.#isOver) {
      this.send({ type: "session.close", ...(reason === undefined ? {} : { reason }) });
    }
    return this.#end();
  }

  /** @returns {Promise<void>} settled when the connection is closed; of a protocol without a goodbye */
  hangUp() {
    this.#hasHungUp ||= !this.isClosed;
    this.leave(1000);
    return this.#end();
  }

  async #end() {
    this.closeSent = true;
    const timer = setTimeout(() => this.leave(), CLOSE_WAIT_MS);
    await this.ended;
    clearTimeout(timer);
  }
}

/** A duplex session that is set up; made by `connect`. */
export class DuplexSession {
  #channel;
  #rest = new Float32Array(0);
  /** @type {string[]} */ #frames = [];
  #sentSamples = 0;
  #sentUnits = 0;
  #onSent;
  #dialect;
  #tools;

  /** @param {Channel} channel @param {Created} created @param {Options} options */
  constructor(channel, created, options) {
    this.#channel = channel;
    this.#onSent = options.onSent;
    this.#tools = new Map(Object.entries(options.tools ?? {}));
    this.#dialect = dialectOf(options);
    this.created = created;
    this.mode = options.mode;
    if (options.onEvent && options.onEnd) tell(this, options.onEvent, options.onEnd);
  }

  /**
   * Send sound, and what was seen with it; less than a second is held until more comes.
   * @param {Float32Array} samples any number of them, 16 kHz mono, in [-1, 1]
   * @param {(Uint8Array | ArrayBuffer | string)[]} [frames] JPEG files, or these in base64, in
   *   mode=video; of those that come to one second the newest four are sent
   */
  append(samples, frames = []) {
    if (!(samples instanceof Float32Array)) throw new MisuseError("samples are to be a Float32Array");
    if (frames.length && this.mode === "audio") throw new MisuseError("video frames in mode=audio");
    let seen = frames.map((frame) => (typeof frame === "string" ? frame : encodeBase64(frame)));
    const joined = new Float32Array(this.#rest.length + samples.length);
    joined.set(this.#rest);
    joined.set(samples, this.#rest.length);
    this.#rest = joined;
    for (let size = this.#next(); this.#rest.length >= size; size = this.#next()) {
      if (this.#rest.length === size) {
        this.#see(seen); // what was seen belongs to the second in which the sound ends
        seen = [];
      }
      this.#send(size);
    }
    this.#rest = this.#rest.slice();
    this.#see(seen);
  }

  /** Send what is held, with silence up to a whole second. */
  flush() {
    if (this.#rest.length || this.#frames.length) this.#sendRest(this.#next(), false);
  }

  /** Make the model stop speaking, at once; what is held goes with it, 250 ms at least. */
  interrupt() {
    this.#must("interrupt");
    this.#sendRest(Math.max(this.#rest.length, APPEND_SAMPLES_MIN), true);
  }

  /**
   * Return what a tool without a function came to.
   * @param {string} id of the call
   * @param {string} output up to 4096 characters
   */
  giveResult(id, output) {
    this.#must("tools");
    this.#channel.send({ type: "input.tool_result", tool_call_id: id, content: output });
  }

  /** Tell the model of an event, with the next second of sound. @param {string} text */
  tell(text) {
    this.#must("tools");
    this.#channel.send({ type: "input.standalone", content: text });
  }

  /**
   * Say how much of the session's speech was played; the recording keeps it.
   * @param {number} playedMs since the session began
   */
  acknowledge(playedMs) {
    this.#must("acknowledge");
    this.#channel.send({ type: "playback.ack", played_ms: Math.round(playedMs) });
  }

  /**
   * End the session; its last events can still be read.
   * @param {string} [reason] in the caller's own words
   * @returns {Promise<void>} settled when the connection is closed
   */
  close(reason) {
    if (reason !== undefined) this.#must("reason");
    return this.#channel.close(reason);
  }

  /** @param {string} what */
  #must(what) {
    if (this.#dialect.lacks.includes(what)) throw new MisuseError(`there is no ${what} in this dialect`);
  }

  /** @returns {AsyncGenerator<SessionEvent, void>} what happens, up to the session's end */
  async *[Symbol.asyncIterator]() {
    for (let event; (event = await this.#channel.receive()) !== null; ) {
      const said = this.#dialect.read(event);
      if (said?.type === "call") this.#answer(said);
      if (said) yield said;
    }
  }

  /** Run the function of a call, and return what it came to; an exception too. @param {CallEvent} call */
  async #answer(call) {
    const tool = this.#tools.get(call.name);
    const run = typeof tool === "function" ? tool : tool?.run;
    if (!run) return;
    let output = "";
    try {
      const made = await run(JSON.parse(call.arguments), call);
      output = typeof made === "string" ? made : (JSON.stringify(made) ?? "null");
    } catch (error) {
      output = `error: ${/** @type {any} */ (error)?.message ?? error}`;
    }
    try {
      this.giveResult(call.id, [...output.slice(0, 2 * RESULT_CHARS_MAX)].slice(0, RESULT_CHARS_MAX).join(""));
    } catch {} // the session is over, and its reader is told
  }

  /** @param {string[]} frames */
  #see(frames) {
    this.#frames = [...this.#frames, ...frames].slice(-FRAMES_MAX);
  }

  /** The samples of the next append: to the end of a unit, and no fewer than it may have. */
  #next() {
    const samples = UNIT_SAMPLES - (this.#sentSamples % UNIT_SAMPLES);
    return samples < APPEND_SAMPLES_MIN ? samples + UNIT_SAMPLES : samples;
  }

  /** @param {number} size @param {boolean} forceListen */
  #sendRest(size, forceListen) {
    const padded = new Float32Array(size);
    padded.set(this.#rest);
    this.#rest = padded;
    this.#send(size, forceListen);
  }

  /** @param {number} size @param {boolean} [forceListen] */
  #send(size, forceListen = false) {
    const seen = this.#frames.length ? { video_frames: this.#frames } : {};
    // A name costs bytes; an answer bears it, so that its delay can be measured.
    const name = this.#onSent ? { input_id: `in_${++this.#sentUnits}` } : {};
    const sound = this.#rest.subarray(0, size);
    this.#channel.send({ ...this.#dialect.append(sound, { force_listen: forceListen, ...seen }), ...name });
    this.#onSent?.(name.input_id ?? "");
    this.#rest = this.#rest.subarray(size);
    this.#frames = [];
    this.#sentSamples += size;
  }
}

/**
 * @param {AsyncIterable<any>} session
 * @param {(event: any) => void} onEvent
 * @param {(error: Error | null) => void} onEnd
 */
async function tell(session, onEvent, onEnd) {
  let failure = null;
  try {
    for await (const event of session) onEvent(event);
  } catch (error) {
    failure = /** @type {Error} */ (error);
  }
  onEnd(failure);
}

/** @param {any} error @returns {ErrorEvent} */
function errorEvent({ code, message, sessionId }) {
  return { type: "error", code, message, sessionId };
}

/**
 * The dialects of a duplex session: their address, what they lack, and how they say things.
 * @type {Record<string, {path: string, query: string, lacks: string[],
 *   init: (options: Options) => object, created: (event: any) => Created | false,
 *   append: (samples: Float32Array, more: object) => object, read: (event: any) => SessionEvent | null}>}
 */
const DIALECTS = {
  realtime: {
    path: "/v1/realtime",
    query: "mode",
    lacks: [],
    init: ({ mode, instructions = "", config, voice, tools, record }) => {
      const offered = tools && Object.entries(tools).map(([name, tool]) => {
        const { description, parameters } = typeof tool === "function" ? {} : tool;
        return { type: "function", function: { name, description, parameters } };
      });
      const wishes = mode === "chat" ? {} : { system_prompt: instructions, config, voice, tools: offered };
      return { type: "session.init", payload: { ...wishes, record, notices: true } };
    },
    created: (event) => event.type === "session.created" && {
      sessionId: event.session_id ?? event.id,
      ...(event.session_id && { recording: event.recording ?? "off" }), // a transcription is not told
      recordingId: event.recording_id ?? "",
      recordingNotice: event.recording_notice ?? "",
      ...(event.tools && { tools: event.tools }),
    },
    append: (samples, more) => ({ type: "input.append", input: { audio: encodeBase64(samples), ...more } }),
    read: readEvent,
  },
  live: {
    path: "/v1/live/sessions",
    query: "",
    lacks: ["config", "voice", "tools", "fork", "onSent", "interrupt", "acknowledge", "reason"],
    init: ({ model, instructions, record }) => {
      const format = { type: "audio/pcm", rate: UNIT_SAMPLES };
      return { type: "session.start", session: { model, instructions, audio: { format }, store: record } };
    },
    created: (event) => event.type === "session.started" && {
      sessionId: event.session.id,
      recording: event.session.store ? "on" : "off",
      recordingId: "",
      recordingNotice: "",
    },
    append: (samples) => {
      return { type: "session.input_audio.append", audio: encodeBase64(toPcm16(samples, PCM16_MAX + 1)) };
    },
    read: readLive,
  },
};

/** @param {Options} options */
function dialectOf({ dialect = "realtime" }) {
  if (!Object.hasOwn(DIALECTS, dialect)) throw new MisuseError(`there is no dialect ${dialect} in this client`);
  return DIALECTS[dialect];
}

/** @param {any} event of `live` @returns {SessionEvent | null} */
function readLive(event) {
  const about = { inputId: "", metrics: {} };
  const speech = { type: /** @type {const} */ ("speech"), endOfTurn: false, responseId: "", ...about };
  switch (event.type) {
    case "session.output_transcript.delta":
      return { ...speech, text: event.delta, audio: new Float32Array(0) };
    case "session.output_audio.delta": {
      const audio = from16kHz(new Int16Array(decodeBase64(event.delta).buffer));
      return audio.some(Boolean) ? { ...speech, text: "", audio } : { type: "listen", ...about };
    }
  }
  return readEvent(event);
}

/** @param {Int16Array} pcm16 at 16 kHz @returns {Float32Array} at 24 kHz, on the lines between its samples */
function from16kHz(pcm16) {
  return Float32Array.from({ length: (pcm16.length * 3) / 2 }, (_, i) => {
    const [at, part] = [Math.floor((i * 2) / 3), ((i * 2) % 3) / 3];
    const next = pcm16[Math.min(at + 1, pcm16.length - 1)];
    return (pcm16[at] + (next - pcm16[at]) * part) / (PCM16_MAX + 1);
  });
}

/** @param {any} event @returns {SessionEvent | null} */
function readEvent(event) {
  const about = { inputId: event.input_id, metrics: event.metrics };
  switch (event.type) {
    case "response.output.delta":
      if (event.kind === "listen") return { type: "listen", ...about };
      return {
        type: "speech",
        text: event.text ?? "",
        audio: decodeAudio(event.audio),
        endOfTurn: event.end_of_turn === true,
        responseId: event.response_id,
        ...about,
      };
    case "response.tool_call.done":
      return { type: "call", id: event.tool_call_id, ...event.call, unit: event.unit_index };
    case "error":
      return errorEvent(event.error);
    case "session.input_transcript.delta":
      return { type: "words", text: event.delta, startMs: event.start_ms, endMs: event.end_ms };
    case "session.going_away":
      return { type: "going_away", secondsLeft: event.seconds_left };
    case "session.closed":
      return { type: "closed", reason: event.reason };
  }
  return null; // of a later version than this client
}

/** A chat that is open; made by `connect`. */
export class ChatSession {
  #channel;
  #onQueue;
  /** @type {Answer | null} */ #answer = null;

  /** @param {Channel} channel @param {Created} created @param {Options} options */
  constructor(channel, created, options) {
    this.#channel = channel;
    this.#onQueue = options.onQueue;
    this.created = created;
  }

  /**
   * Ask; the answer is still to come. A server remembers nothing: give it the whole conversation.
   * @param {string | Message[]} question the user's words, or the conversation that ends with them
   * @param {object} [how]
   * @param {boolean} [how.stream] the answer comes as it is made (true), or at once
   * @param {boolean | object} [how.speech] whether it is spoken; an object: as on the wire (`tts`)
   * @param {object} [how.generation] how it is generated, as on the wire
   * @param {object} [how.image] how pictures are cut, as on the wire
   * @param {object[]} [how.tools] what the model may call, as on the wire
   * @param {string} [how.inputId] a name for this turn
   * @returns {Promise<Answer>} to be iterated, or finished
   */
  async ask(question, { stream = true, speech = false, generation, image, tools, inputId } = {}) {
    if (this.#answer && !this.#answer.isOver) {
      throw new MisuseError("a question during the answer to another: read that to its end");
    }
    /** @type {Message[]} */
    const messages = typeof question === "string" ? [{ role: "user", content: question }] : question;
    const input = {
      messages: messages.map(encodeMessage),
      streaming: stream,
      tts: typeof speech === "object" ? { enabled: true, ...speech } : { enabled: speech },
      ...(generation ? { generation } : {}),
      ...(image ? { image } : {}),
      ...(tools ? { tools } : {}),
    };
    const name = inputId === undefined ? {} : { input_id: inputId };
    this.#channel.send({ type: "input.append", input, ...name });
    this.#answer = new Answer(this.#channel, this.#onQueue);
    return this.#answer;
  }

  /**
   * Ask, and wait for the whole answer.
   * @param {string | Message[]} question
   * @param {Parameters<ChatSession["ask"]>[1]} [how] see `ask`
   * @returns {Promise<Response>}
   */
  async answer(question, how) {
    return (await this.ask(question, { ...how, stream: false })).finish();
  }

  /** End the answer that is under way: its response, with the reason `interrupted`, is still to be read. */
  cancel() {
    if (this.#answer && !this.#answer.isOver) this.#channel.send({ type: "response.cancel" });
  }

  /**
   * End the session; an answer that is under way is cut.
   * @param {string} [reason] in the caller's own words
   * @returns {Promise<void>} settled when the connection is closed
   */
  close(reason) {
    return this.#channel.close(reason);
  }
}

/** The answer to one question: iterate it for deltas and at last the response. */
export class Answer {
  #channel;
  #onQueue;
  isOver = false;
  /** @type {Response | null} */ response = null;

  /** @param {Channel} channel @param {Options["onQueue"]} onQueue */
  constructor(channel, onQueue) {
    this.#channel = channel;
    this.#onQueue = onQueue;
  }

  /** @returns {AsyncGenerator<Delta | Response, void>} */
  async *[Symbol.asyncIterator]() {
    while (!this.isOver) {
      const event = await this.#channel.receive();
      if (event === null) {
        throw new SessionClosedError(this.#channel.code, this.#channel.reason);
      }
      if (event.type === "session.queued" || event.type === "session.queue_update") {
        this.#onQueue?.(event);
      } else if (event.type === "response.output.delta") {
        yield { type: "delta", text: event.text ?? "", audio: decodeAudio(event.audio) };
      } else if (event.type === "response.done") {
        this.isOver = true;
        this.response = {
          type: "response",
          text: event.text,
          audio: decodeAudio(event.audio),
          reason: event.reason,
          responseId: event.response_id,
          metrics: event.metrics,
          toolCalls: event.tool_calls ?? [],
        };
        yield this.response;
      } else if (event.type === "error" && !REFUSALS.includes(event.error.code)) {
        this.isOver = true;
        throw new ReportedError(event.error);
      }
    }
  }

  /** @returns {Promise<Response>} once the answer has come to its end */
  async finish() {
    for await (const _ of this);
    if (this.response === null) throw new MisuseError("the answer has failed, and was told so before");
    return this.response;
  }
}

/**
 * A transcription whose model is chosen; made by `connect`.
 *
 * An utterance begins with its first sound and ends with `finish`; what is appended next is the next
 * one's. Each is answered by one `done`, in order, after the deltas whose joined texts are its text.
 * An `error` ends no session: `context_full` and `inference_error` come before the end of their
 * utterance; after `buffer_full` what was sent is not kept.
 */
export class TranscriptionSession {
  #channel;
  #isBegun = false;

  /** @param {Channel} channel @param {Created} created @param {Options} options */
  constructor(channel, created, options) {
    this.#channel = channel;
    this.created = created;
    if (options.onEvent && options.onEnd) tell(this, options.onEvent, options.onEnd);
  }

  /**
   * Send sound of the utterance; the first begins it. It does not wait: send at the pace of speech.
   * @param {Float32Array | Int16Array} samples any number of them, 16 kHz mono; floats in [-1, 1]
   */
  append(samples) {
    if (!(samples instanceof Float32Array || samples instanceof Int16Array)) {
      throw new MisuseError("samples are to be a Float32Array or an Int16Array");
    }
    const pcm = samples instanceof Int16Array ? samples : toPcm16(samples, PCM16_MAX);
    if (!this.#isBegun) this.#commit(false);
    this.#isBegun = true;
    for (let start = 0; start < pcm.length; start += APPEND_SAMPLES_MAX) {
      const audio = encodeBase64(pcm.subarray(start, start + APPEND_SAMPLES_MAX));
      this.#channel.send({ type: "input_audio_buffer.append", audio });
    }
  }

  /** Say that the utterance is over; its `done` comes once all of it is heard. */
  finish() {
    this.#commit(true);
    this.#isBegun = false;
  }

  /**
   * Hang up; what is not written yet never is, so read up to the last `done` before.
   * @returns {Promise<void>} settled when the connection is closed
   */
  close() {
    return this.#channel.hangUp();
  }

  /**
   * @returns {AsyncGenerator<TranscriptEvent, void>} what is written, until `close`
   * @throws {ReportedError} the server does not have the model
   * @throws {SessionClosedError} the server has ended the session
   */
  async *[Symbol.asyncIterator]() {
    for (let event; (event = await this.#channel.receive()) !== null; ) {
      if (event.type === "transcription.delta") {
        yield { type: "delta", text: event.delta };
      } else if (event.type === "transcription.done") {
        yield { type: "done", text: event.text, usage: event.usage };
      } else if (event.type === "error") {
        if (MODEL_ERRORS.includes(event.error.code)) throw new ReportedError(event.error);
        yield errorEvent(event.error);
      }
    }
  }

  /** @param {boolean} final */
  #commit(final) {
    this.#channel.send({ type: "input_audio_buffer.commit", ...(final ? { final } : {}) });
  }
}

/**
 * Round samples to 16-bit integers, to even ones where two are as near; what is too loud is clipped.
 * @param {Float32Array} samples
 * @param {number} scale what 1 is
 * @returns {Int16Array}
 */
function toPcm16(samples, scale) {
  return Int16Array.from(samples, (sample) => {
    const scaled = Math.fround(Math.max(-1, Math.min(1, sample)) * scale);
    const rounded = Math.round(scaled);
    return Math.min(PCM16_MAX, rounded - scaled === 0.5 && rounded % 2 ? rounded - 1 : rounded);
  });
}

/** @param {Message} message @returns {object} with bytes and samples as base64 */
function encodeMessage({ content, ...message }) {
  if (!content || typeof content === "string") return { ...message, content };
  const encoded = content.map(({ data, ...part }) => {
    if (data === undefined) return part;
    return { ...part, data: typeof data === "string" ? data : encodeBase64(/** @type {any} */ (data)) };
  });
  return { ...message, content: encoded };
}

/**
 * Open a session and set it up.
 * @template {Options} T
 * @param {string} url of the server, such as `ws://127.0.0.1:8006`; a path is added where it has none
 * @param {T} options
 * @returns {Promise<T["mode"] extends "chat" ? ChatSession
 *   : T["mode"] extends "transcription" ? TranscriptionSession : DuplexSession>}
 * @throws {AntiphonError} see the classes of errors
 * @throws {TypeError} `onEvent` without `onEnd`: a lost connection would not be reported
 */
export async function connect(url, options) {
  if (options.onEvent && typeof options.onEnd !== "function") {
    throw new TypeError("onEvent needs onEnd: a function that is told when the session is over");
  }
  if (options.mode === "transcription" && !options.model && options.record === false) {
    throw new MisuseError("a transcription that is not to be recorded needs a model");
  }
  if (options.tools && !["audio", "video"].includes(options.mode)) {
    throw new MisuseError(`there are no tools in a session of mode=${options.mode}`);
  }
  const { dialect = "realtime", retries = 4, random = Math.random, signal } = options;
  const lacking = Object.keys(options).find((name) => dialectOf(options).lacks.includes(name));
  if (lacking) throw new MisuseError(`there is no ${lacking} in ${dialect}`);
  if (dialect !== "realtime" && options.mode !== "audio") throw new MisuseError(`${dialect} has only mode=audio`);
  const address = endpoint(url, options);
  for (let attempt = 0; ; attempt++) {
    signal?.throwIfAborted();
    try {
      return /** @type {any} */ (await open(address, options));
    } catch (error) {
      if (signal?.aborted || attempt >= retries || !mayPass(error)) throw error;
    }
    await new Promise((resolve) => {
      setTimeout(resolve, backoff(attempt, random()));
      signal?.addEventListener("abort", resolve, { once: true });
    });
  }
}

/** @param {number} attempt from 0 @param {number} chance in [0, 1) @returns {number} milliseconds */
function backoff(attempt, chance) {
  return Math.min(BACKOFF_MS * 2 ** attempt, BACKOFF_MS_MAX) * (1 - chance / 2);
}

/** @param {string} url @param {Options} options */
function endpoint(url, options) {
  let address;
  try {
    address = new URL(url);
  } catch {
    throw new MisuseError(`${url} is not an address: it is like ws://127.0.0.1:8006`);
  }
  if (!/^wss?:$/.test(address.protocol)) throw new MisuseError("an address begins with ws: or wss:");
  const { path, query } = dialectOf(options);
  if (["/", DIALECTS.realtime.path].includes(address.pathname)) address.pathname = path;
  if (query) address.searchParams.set(query, options.mode);
  const { recording, unit } = options.fork ?? {};
  if (recording) address.searchParams.set("fork", recording);
  if (unit !== undefined) address.searchParams.set("at", String(unit));
  return address.href;
}

/** @param {unknown} error */
function mayPass(error) {
  if (error instanceof SessionClosedError) return PASSING_CLOSE_CODES.includes(error.code);
  return error instanceof CannotConnectError || error instanceof SessionRefusedError;
}

/** @param {string} address @param {Options} options */
async function open(address, options) {
  const Socket = options.WebSocket ?? /** @type {any} */ (globalThis).WebSocket;
  if (!Socket) throw new MisuseError("there is no global WebSocket, as in Node before 22: give one as the option WebSocket");
  // A browser cannot set headers: a key goes as a subprotocol, of which the server picks the other.
  const protocols = options.key === undefined ? [] : ["antiphon", `antiphon.key.${options.key}`];
  const { resume: isResumable = true, random = Math.random, onConnection } = options;
  const connectTo = (/** @type {string} */ resume) => {
    const to = new URL(address);
    if (isResumable) to.searchParams.set("resumable", "1");
    if (resume) to.searchParams.set("resume", resume);
    return new Socket(to.href, protocols);
  };
  const channel = new Channel(connectTo, { random, onConnection });
  const abort = () => {
    channel.leave(1000); // with another code the server would keep the place for a client that comes back
    channel.fail(options.signal?.reason);
  };
  options.signal?.addEventListener("abort", abort);
  try {
    const created = await setUp(channel, options);
    if (options.mode === "transcription") return new TranscriptionSession(channel, created, options);
    const Session = options.mode === "chat" ? ChatSession : DuplexSession;
    return new Session(channel, created, options);
  } catch (error) {
    channel.leave(1000); // as above: no client comes back to a session that was not set up
    if (options.signal?.aborted) throw error;
    if (!channel.hasOpened) throw new CannotConnectError(`cannot connect to ${address}${whyPerhaps(address)}`);
    throw error;
  } finally {
    options.signal?.removeEventListener("abort", abort);
  }
}

/**
 * A browser hides from a page that the server refused it for its origin: name what the server needs.
 * @param {string} address
 */
function whyPerhaps(address) {
  const { location } = /** @type {any} */ (globalThis);
  if (!location || location.host === new URL(address).host) return "";
  const { origin } = location;
  if (origin === "null") return "; a server refuses pages that are files: have one serve them (--static)";
  return `; a server refuses pages of ${origin} unless it is started with --origin ${origin}`;
}

/** @param {Channel} channel @param {Options} options @returns {Promise<Created>} */
async function setUp(channel, options) {
  const { mode, model, record, onQueue } = options;
  const dialect = dialectOf(options);
  for (;;) {
    const event = await channel.receive();
    if (event === null) throw new SessionClosedError(channel.code, channel.reason);
    if (event.type === "session.queued" || event.type === "session.queue_update") onQueue?.(event);
    if (event.code === "session_queued") onQueue?.({ ...NOWHERE, message: event.message });
    const isNext = event.type === "session.queue_done" || event.code === "slot_assigned";
    if (isNext) channel.send(dialect.init(options));
    const created = dialect.created(event);
    if (created) {
      if (mode === "transcription" && model) channel.send({ type: "session.update", model, record });
      return created;
    }
    if (event.type === "error" && !REFUSALS.includes(event.error.code)) {
      throw new ReportedError(event.error);
    }
  }
}
