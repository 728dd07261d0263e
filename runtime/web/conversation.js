/**
 * A spoken conversation: microphone, loudspeaker and camera over one full-duplex session.
 *
 *     const conversation = new Conversation("wss://server.example", { instructions: "Be brief." });
 *     conversation.on("caption", ({ text }) => show(text));
 *     conversation.on("queue", ({ position }) => show(`place ${position}`));
 *     await conversation.start();               // after a click; asks for the microphone
 *     button.onclick = () => conversation.interrupt();
 *     await conversation.stop();
 *
 * Rules: devices that are given are opened and closed with the conversation. Nothing is sent before
 * the session has begun, nor while its connection is lost: sound that is old when it arrives makes a
 * model late. What the model had said when it was interrupted is not played on. A listener that throws
 * ends nothing.
 */

import { connect, MisuseError } from "./antiphon.js";
import { Microphone } from "./microphone.js";
import { Speaker } from "./speaker.js";
import { EchoMeter } from "./echo.js";
import { Emitter, VoiceClock } from "./listeners.js";

const UNIT_MS = 1000;
const UNIT_SAMPLES = 16_000;
/** From the end of a second to its answer here: the user's voice in it is so old at least. */
const HEARD_MS = 300;
/** A picture is taken so long before its second ends: encoding takes some tens of milliseconds. */
const CAPTURE_SAMPLES = 14_400;
/** Appends whose answers are still to come: a server keeps five, and some are on their way. */
const SENT_MAX = 64;
/** Reports of what was played: one a second is enough for a recording. */
const ACKNOWLEDGE_MS = 1000;

/**
 * @typedef {import("./antiphon.js").DuplexSession} DuplexSession
 * @typedef {import("./antiphon.js").QueuePlace} QueuePlace
 * @typedef {import("./antiphon.js").Created} Created
 * @typedef {import("./antiphon.js").Metrics} Metrics
 * @typedef {"idle" | "opening" | "connecting" | "queued" | "listening" | "speaking" | "reconnecting"
 *   | "ended"} ConversationState
 * @typedef {{kind: "listen" | "speak" | "dropped" | "failed", isLate: boolean, inputId: string,
 *   latencyMs: number | null, metrics: Metrics}} UnitEvent one second: what became of it, and how long its
 *   answer took to come; `dropped`: the model was too slow, and never heard it
 * @typedef {object} ConversationEvents
 * @property {{state: ConversationState, previous: ConversationState}} state
 * @property {QueuePlace} queue the place in the queue
 * @property {Created} created the session has begun
 * @property {UnitEvent} unit
 * @property {{inputId: string, latencyMs: number}} late an answer took longer than its second
 * @property {{delayMs: number}} answer the model begins to speak, so long after its user
 * @property {{responseId: string, text: string, isFinal: boolean, isInterrupted: boolean}} caption all words
 *   of the turn so far
 * @property {{text: string, startMs: number, endMs: number}} words what the user said, where the server has a
 *   transcriber: words, or a part of one
 * @property {{responseId: string, text: string}} turn the model has ended its turn
 * @property {{responseId: string, text: string, playedMs: number, cutMs: number, silentMs: number}} interrupted
 *   the turn was cut: so much was played and not, and so long after the event it was silent
 * @property {import("./antiphon.js").CallEvent} call the model calls a tool: a function of `tools` runs by itself
 * @property {import("./echo.js").EchoEvent} echo the microphone was compared with the loudspeaker, after each two
 *   seconds of speech: `isHeard`, the model hears itself, and its user needs headphones
 * @property {import("./antiphon.js").ConnectionEvent} connection it is lost, or back
 * @property {{secondsLeft: number}} going_away the server will shut down
 * @property {{code: string, message: string}} error the server reported one, and the session goes on
 * @property {{reason: string, error: Error | null}} ended the last event
 *
 * @typedef {Omit<import("./antiphon.js").Options, "mode" | "model" | "signal" | "onQueue" | "onEvent" | "onEnd"
 *   | "onConnection" | "onSent">} ConnectOptions
 * @typedef {object} Devices
 * @property {Microphone} [microphone] by default the browser's
 * @property {Speaker} [speaker] by default the browser's
 * @property {import("./camera.js").Camera | null} [camera] with one the session is of mode `video`
 * @property {"audio" | "video"} [mode] by default `video` where there is a camera
 */

/**
 * A conversation; `start` begins it, and it can be started again after its end.
 * @extends {Emitter<ConversationEvents>}
 */
export class Conversation extends Emitter {
  /** @type {ConversationState} */ state = "idle";
  /** The session, once it has begun. @type {DuplexSession | null} */ session = null;
  /** The session as the server created it: its ids, and whether it is recorded. @type {Created | null} */ created =
    null;
  #url;
  #options;
  #mode;
  #voice = new VoiceClock();
  #echo = this.#meter();
  /** @type {Map<string, number>} */ #sent = new Map();
  #samples = 0;
  /** Null: those of a fork's past are not known yet. @type {number | null} */ #dropped = 0;
  /** @type {{responseId: string, text: string} | null} */ #turn = null;
  #lastInput = "";
  #worded = "";
  #isCapturing = false;
  /** @type {Uint8Array[]} */ #frames = [];
  #playedBefore = 0;
  #acknowledgedAt = 0;
  #aborting = new AbortController();

  /** @param {string} url of the server @param {ConnectOptions & Devices} [options] */
  constructor(
    url,
    { microphone = new Microphone(), speaker = new Speaker(), camera = null, mode, ...options } = {},
  ) {
    super();
    this.#url = url;
    this.#options = options;
    this.#mode = mode;
    this.microphone = microphone;
    this.speaker = speaker;
    this.camera = camera;
  }

  /** The mode of the session: `video` has pictures. */
  get mode() {
    return this.#mode ?? (this.camera ? "video" : "audio");
  }

  /**
   * Open the devices, wait for the session, and talk until it ends.
   * @returns {Promise<void>} settled when the session has begun, or `stop` came before
   * @throws {import("./microphone.js").DeviceError} a device is refused or missing
   * @throws {import("./antiphon.js").AntiphonError} the server does not take the session
   */
  async start() {
    if (this.state !== "idle" && this.state !== "ended") throw new MisuseError("the conversation has begun");
    const { signal } = this.#begin();
    const isOver = () => signal.aborted;
    try {
      this.#enter("opening");
      await this.speaker.open(); // first, and at once: a browser wants a click for it
      if (!isOver()) await this.microphone.open();
      if (!isOver()) await this.camera?.open();
      if (isOver()) return;
      this.#enter("connecting");
      const session = /** @type {DuplexSession} */ (await this.#connect(signal));
      if (isOver()) return void session.close("stopped");
      this.#talk(session);
    } catch (error) {
      if (isOver()) return;
      this.#end("failed", /** @type {Error} */ (error));
      throw error;
    }
  }

  /** Make the model stop speaking, at once. */
  async interrupt() {
    if (!this.session || this.state !== "speaking") return;
    const at = performance.now();
    this.session.interrupt();
    await this.#silence(at);
  }

  /** End it, in any state. @param {string} [reason] in the caller's own words @returns {Promise<void>} */
  async stop(reason = "stopped") {
    if (this.state === "idle" || this.state === "ended") return;
    this.#aborting.abort();
    this.microphone.onSamples = undefined;
    if (this.session) await this.session.close(reason);
    else this.#end("stopped", null);
  }

  // -- the session ---------------------------------------------------------------------------------

  #begin() {
    [this.session, this.created, this.#turn] = [null, null, null];
    [this.#samples, this.#acknowledgedAt, this.#frames, this.#lastInput] = [0, 0, [], ""];
    this.#dropped = this.#options.fork ? null : 0;
    this.#aborting = new AbortController();
    this.#sent.clear();
    this.#voice = new VoiceClock();
    this.#echo = this.#meter();
    return this.#aborting;
  }

  #meter() {
    return new EchoMeter((echo) => this.emit("echo", echo));
  }

  /** @param {AbortSignal} signal */
  #connect(signal) {
    const isCurrent = () => signal === this.#aborting.signal; // not of a session before
    return connect(this.#url, {
      ...this.#options,
      signal,
      mode: this.mode,
      onQueue: (place) => {
        if (signal.aborted) return;
        if (this.state !== "queued") this.#enter("queued");
        this.emit("queue", place);
      },
      onSent: (inputId) => {
        this.#sent.set(inputId, performance.now());
        if (this.#sent.size > SENT_MAX)
          this.#sent.delete(/** @type {string} */ (this.#sent.keys().next().value));
      },
      onEvent: (event) => isCurrent() && this.#hear(event),
      onEnd: (error) => isCurrent() && this.#end(this.#reason, error),
      onConnection: (event) => {
        this.emit("connection", event);
        if (event.type === "reconnecting") this.#enter("reconnecting");
        else this.#enter(this.#turn ? "speaking" : "listening");
      },
    });
  }
  #reason = "lost";

  /** @param {DuplexSession} session */
  #talk(session) {
    this.session = session;
    this.created = session.created;
    this.#reason = "lost";
    this.#playedBefore = this.speaker.playedMs;
    this.speaker.onPlayed = (playedMs) => this.#acknowledge(playedMs - this.#playedBefore, false);
    this.speaker.onIdle = () => this.#acknowledge(this.speaker.playedMs - this.#playedBefore, true);
    this.speaker.onLevels = (levels, frame) => this.#echo.play(levels, frame);
    this.microphone.onSamples = (samples) => {
      this.#echo.hear(samples);
      this.#say(samples);
    };
    this.microphone.onLost = (error) => this.#fail(error);
    if (this.camera)
      this.camera.onLost = (error) => this.emit("error", { code: "camera_lost", message: error.message });
    this.#enter("listening");
    this.emit("created", session.created);
  }

  /** @param {Error} error */
  #fail(error) {
    const session = this.session;
    this.#end("failed", error);
    session?.close("failed").catch(() => {});
  }

  /** @param {string} reason @param {Error | null} error */
  #end(reason, error) {
    if (this.state === "ended") return;
    this.microphone.onSamples = undefined;
    this.session = null;
    this.microphone.close();
    this.speaker.close();
    this.camera?.close();
    this.#enter("ended");
    this.emit("ended", {
      reason: this.#aborting.signal.aborted ? "stopped" : reason,
      error: this.#aborting.signal.aborted ? null : error,
    });
  }

  /** @param {ConversationState} state */
  #enter(state) {
    if (this.state === "ended" && state !== "opening") return;
    const previous = this.state;
    this.state = state;
    if (state !== previous) this.emit("state", { state, previous });
  }

  // -- what is said --------------------------------------------------------------------------------

  /** @param {Float32Array} samples */
  #say(samples) {
    if (!this.session || this.state === "reconnecting") return;
    this.#voice.hear(samples);
    const before = this.#samples % UNIT_SAMPLES;
    this.#samples += samples.length;
    if (before < CAPTURE_SAMPLES && before + samples.length >= CAPTURE_SAMPLES) this.#capture();
    try {
      this.session.append(samples, this.#frames.splice(0));
    } catch (error) {
      this.emit("error", { code: "not_sent", message: /** @type {Error} */ (error).message });
    }
  }

  async #capture() {
    if (!this.camera?.isOpen || this.#isCapturing || this.mode !== "video") return;
    this.#isCapturing = true;
    try {
      const frame = await this.camera.capture();
      if (frame) this.#frames = [frame];
    } finally {
      this.#isCapturing = false;
    }
  }

  /** @param {number} playedMs @param {boolean} isLast */
  #acknowledge(playedMs, isLast) {
    const now = performance.now();
    if (!this.session || this.#aborting.signal.aborted || this.state === "reconnecting") return;
    if (!isLast && now - this.#acknowledgedAt < ACKNOWLEDGE_MS) return;
    this.#acknowledgedAt = now;
    try {
      this.session.acknowledge(playedMs);
    } catch {} // the session is over, and `ended` says so
  }

  // -- what is heard -------------------------------------------------------------------------------

  /** @param {import("./antiphon.js").SessionEvent} event */
  #hear(event) {
    switch (event.type) {
      case "listen":
        this.#note("listen", event);
        if (this.#turn) this.#silence(performance.now());
        return;
      case "speech":
        this.#note("speak", event);
        return this.#speak(event);
      case "words":
        return this.emit("words", event);
      case "call":
        return this.emit("call", event);
      case "error":
        if (event.code === "inference_error")
          this.emit("unit", { kind: "failed", isLate: false, inputId: "", latencyMs: null, metrics: {} });
        return this.emit("error", { code: event.code, message: event.message });
      case "going_away":
        return this.emit("going_away", { secondsLeft: event.secondsLeft });
      case "closed":
        this.#reason = event.reason;
    }
  }

  /** @param {"listen" | "speak"} kind @param {{inputId: string, metrics: Metrics}} event */
  #note(kind, { inputId, metrics }) {
    if (inputId === this.#lastInput) return; // its text came first, and its sound now
    this.#lastInput = inputId;
    const sentAt = this.#sent.get(inputId);
    this.#sent.delete(inputId);
    const dropped = Number(metrics.dropped_units ?? 0);
    this.#dropped ??= dropped;
    for (; this.#dropped < dropped; this.#dropped++) {
      this.emit("unit", { kind: "dropped", isLate: false, inputId: "", latencyMs: null, metrics });
    }
    const latencyMs = sentAt === undefined ? null : performance.now() - sentAt;
    const isLate = latencyMs !== null && latencyMs > UNIT_MS;
    this.emit("unit", { kind, isLate, inputId, latencyMs, metrics });
    if (isLate) this.emit("late", { inputId, latencyMs: /** @type {number} */ (latencyMs) });
  }

  /** @param {import("./antiphon.js").SpeechEvent} event */
  #speak({ text, audio, endOfTurn, responseId, inputId }) {
    if (text) this.#worded = inputId;
    if (this.#turn && (this.#isCut(endOfTurn, inputId) || this.#turn.responseId !== responseId)) {
      this.#silence(performance.now());
      if (endOfTurn) return; // the rest of a word
    }
    if (!this.#turn && (text || audio.length)) {
      this.#turn = { responseId, text: "" };
      const delayMs = this.#voice.sinceMs();
      if (delayMs !== null) this.emit("answer", { delayMs });
      this.#enter("speaking");
    }
    if (audio.length) this.speaker.play(audio);
    if (!this.#turn) return;
    const turn = this.#turn;
    turn.text += text;
    this.emit("caption", { ...turn, isFinal: endOfTurn, isInterrupted: false });
    if (!endOfTurn) return;
    this.#turn = null;
    this.emit("turn", { ...turn });
    this.#enter("listening");
  }

  /**
   * Whether a turn's end is that of a model that was interrupted: a second without a word, in which the
   * user spoke. (Another sign is a `listen` before the turn's end.)
   * @param {boolean} endOfTurn @param {string} inputId
   */
  #isCut(endOfTurn, inputId) {
    return endOfTurn && this.#worded !== inputId && (this.#voice.sinceMs() ?? Infinity) < UNIT_MS + HEARD_MS;
  }

  /** Throw away what is not played yet. @param {number} at when it was to be silent */
  async #silence(at) {
    const turn = this.#turn;
    this.#turn = null;
    if (turn) this.emit("caption", { ...turn, isFinal: true, isInterrupted: true });
    this.#enter("listening");
    const { playedMs, cutMs } = await this.speaker.flush();
    const played = playedMs - this.#playedBefore;
    this.#acknowledge(played, true);
    if (turn) this.emit("interrupted", { ...turn, playedMs: played, cutMs, silentMs: performance.now() - at });
  }
}
