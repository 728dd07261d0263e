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
export class Conversation extends Emitter<ConversationEvents> {
    /** @param {string} url of the server @param {ConnectOptions & Devices} [options] */
    constructor(url: string, { microphone, speaker, camera, mode, ...options }?: ConnectOptions & Devices);
    /** @type {ConversationState} */ state: ConversationState;
    /** The session, once it has begun. @type {DuplexSession | null} */ session: DuplexSession | null;
    /** The session as the server created it: its ids, and whether it is recorded. @type {Created | null} */ created: Created | null;
    microphone: Microphone;
    speaker: Speaker;
    camera: import("./camera.js").Camera | null;
    /** The mode of the session: `video` has pictures. */
    get mode(): "audio" | "video";
    /**
     * Open the devices, wait for the session, and talk until it ends.
     * @returns {Promise<void>} settled when the session has begun, or `stop` came before
     * @throws {import("./microphone.js").DeviceError} a device is refused or missing
     * @throws {import("./antiphon.js").AntiphonError} the server does not take the session
     */
    start(): Promise<void>;
    /** Make the model stop speaking, at once. */
    interrupt(): Promise<void>;
    /** End it, in any state. @param {string} [reason] in the caller's own words @returns {Promise<void>} */
    stop(reason?: string): Promise<void>;
    #private;
}
export type DuplexSession = import("./antiphon.js").DuplexSession;
export type QueuePlace = import("./antiphon.js").QueuePlace;
export type Created = import("./antiphon.js").Created;
export type Metrics = import("./antiphon.js").Metrics;
export type ConversationState = "idle" | "opening" | "connecting" | "queued" | "listening" | "speaking" | "reconnecting" | "ended";
/**
 * one second: what became of it, and how long its
 * answer took to come; `dropped`: the model was too slow, and never heard it
 */
export type UnitEvent = {
    kind: "listen" | "speak" | "dropped" | "failed";
    isLate: boolean;
    inputId: string;
    latencyMs: number | null;
    metrics: Metrics;
};
export type ConversationEvents = {
    state: {
        state: ConversationState;
        previous: ConversationState;
    };
    /**
     * the place in the queue
     */
    queue: QueuePlace;
    /**
     * the session has begun
     */
    created: Created;
    unit: UnitEvent;
    /**
     * an answer took longer than its second
     */
    late: {
        inputId: string;
        latencyMs: number;
    };
    /**
     * the model begins to speak, so long after its user
     */
    answer: {
        delayMs: number;
    };
    /**
     * all words
     * of the turn so far
     */
    caption: {
        responseId: string;
        text: string;
        isFinal: boolean;
        isInterrupted: boolean;
    };
    /**
     * what the user said, where the server has a
     * transcriber: words, or a part of one
     */
    words: {
        text: string;
        startMs: number;
        endMs: number;
    };
    /**
     * the model has ended its turn
     */
    turn: {
        responseId: string;
        text: string;
    };
    /**
     * the turn was cut: so much was played and not, and so long after the event it was silent
     */
    interrupted: {
        responseId: string;
        text: string;
        playedMs: number;
        cutMs: number;
        silentMs: number;
    };
    /**
     * the model calls a tool: a function of `tools` runs by itself
     */
    call: import("./antiphon.js").CallEvent;
    /**
     * the microphone was compared with the loudspeaker, after each two
     * seconds of speech: `isHeard`, the model hears itself, and its user needs headphones
     */
    echo: import("./echo.js").EchoEvent;
    /**
     * it is lost, or back
     */
    connection: import("./antiphon.js").ConnectionEvent;
    /**
     * the server will shut down
     */
    going_away: {
        secondsLeft: number;
    };
    /**
     * the server reported one, and the session goes on
     */
    error: {
        code: string;
        message: string;
    };
    /**
     * the last event
     */
    ended: {
        reason: string;
        error: Error | null;
    };
};
export type ConnectOptions = Omit<import("./antiphon.js").Options, "mode" | "model" | "signal" | "onQueue" | "onEvent" | "onEnd" | "onConnection" | "onSent">;
export type Devices = {
    /**
     * by default the browser's
     */
    microphone?: Microphone | undefined;
    /**
     * by default the browser's
     */
    speaker?: Speaker | undefined;
    /**
     * with one the session is of mode `video`
     */
    camera?: import("./camera.js").Camera | null | undefined;
    /**
     * by default `video` where there is a camera
     */
    mode?: "audio" | "video" | undefined;
};
import { Emitter } from "./listeners.js";
import { Microphone } from "./microphone.js";
import { Speaker } from "./speaker.js";
