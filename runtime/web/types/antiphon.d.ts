/**
 * Write bytes, or samples (little-endian, as all machines with a WebSocket have it), as base64.
 * @param {ArrayBuffer | ArrayBufferView} data
 * @returns {string}
 */
export function encodeBase64(data: ArrayBuffer | ArrayBufferView): string;
/**
 * Read base64.
 * @param {string} text
 * @returns {Uint8Array} with a buffer of its own
 */
export function decodeBase64(text: string): Uint8Array;
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
export function connect<T extends Options>(url: string, options: T): Promise<T["mode"] extends "chat" ? ChatSession : T["mode"] extends "transcription" ? TranscriptionSession : DuplexSession>;
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
    constructor(message: string);
}
/** There is no answer at the address, or not that of a server; a browser does not say why, the message guesses. */
export class CannotConnectError extends AntiphonError {
}
/** What was asked for is not possible now, or never is: a mistake of the calling code. */
export class MisuseError extends AntiphonError {
}
/** The server broke the protocol. */
export class RemoteProtocolError extends AntiphonError {
}
/** The server answered a request with an `error`; the session lives on. */
export class ReportedError extends AntiphonError {
    /** @param {{code: string, message: string, sessionId?: string}} error by `sessionId` an operator finds it */
    constructor({ code, message, sessionId }: {
        code: string;
        message: string;
        sessionId?: string;
    });
    code: string;
    sessionId: string;
}
/** The server has no place for the session. */
export class SessionRefusedError extends AntiphonError {
    /** @param {{code: string, message: string, sessionId?: string}} error by `sessionId` an operator finds it */
    constructor({ code, message, sessionId }: {
        code: string;
        message: string;
        sessionId?: string;
    });
    code: string;
    sessionId: string;
}
/** The connection is over: its close code and reason. */
export class SessionClosedError extends AntiphonError {
    /** @param {number} code @param {string} reason */
    constructor(code: number, reason: string);
    code: number;
    reason: string;
}
/** A duplex session that is set up; made by `connect`. */
export class DuplexSession {
    /** @param {Channel} channel @param {Created} created @param {Options} options */
    constructor(channel: Channel, created: Created, options: Options);
    created: Created;
    mode: "audio" | "video" | "chat" | "transcription";
    /**
     * Send sound, and what was seen with it; less than a second is held until more comes.
     * @param {Float32Array} samples any number of them, 16 kHz mono, in [-1, 1]
     * @param {(Uint8Array | ArrayBuffer | string)[]} [frames] JPEG files, or these in base64, in
     *   mode=video; of those that come to one second the newest four are sent
     */
    append(samples: Float32Array, frames?: (Uint8Array | ArrayBuffer | string)[]): void;
    /** Send what is held, with silence up to a whole second. */
    flush(): void;
    /** Make the model stop speaking, at once; what is held goes with it, 250 ms at least. */
    interrupt(): void;
    /**
     * Return what a tool without a function came to.
     * @param {string} id of the call
     * @param {string} output up to 4096 characters
     */
    giveResult(id: string, output: string): void;
    /** Tell the model of an event, with the next second of sound. @param {string} text */
    tell(text: string): void;
    /**
     * Say how much of the session's speech was played; the recording keeps it.
     * @param {number} playedMs since the session began
     */
    acknowledge(playedMs: number): void;
    /**
     * End the session; its last events can still be read.
     * @param {string} [reason] in the caller's own words
     * @returns {Promise<void>} settled when the connection is closed
     */
    close(reason?: string): Promise<void>;
    /** @returns {AsyncGenerator<SessionEvent, void>} what happens, up to the session's end */
    [Symbol.asyncIterator](): AsyncGenerator<SessionEvent, void>;
    #private;
}
/** A chat that is open; made by `connect`. */
export class ChatSession {
    /** @param {Channel} channel @param {Created} created @param {Options} options */
    constructor(channel: Channel, created: Created, options: Options);
    created: Created;
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
    ask(question: string | Message[], { stream, speech, generation, image, tools, inputId }?: {
        stream?: boolean | undefined;
        speech?: boolean | object | undefined;
        generation?: object | undefined;
        image?: object | undefined;
        tools?: object[] | undefined;
        inputId?: string | undefined;
    }): Promise<Answer>;
    /**
     * Ask, and wait for the whole answer.
     * @param {string | Message[]} question
     * @param {Parameters<ChatSession["ask"]>[1]} [how] see `ask`
     * @returns {Promise<Response>}
     */
    answer(question: string | Message[], how?: Parameters<ChatSession["ask"]>[1]): Promise<Response>;
    /** End the answer that is under way: its response, with the reason `interrupted`, is still to be read. */
    cancel(): void;
    /**
     * End the session; an answer that is under way is cut.
     * @param {string} [reason] in the caller's own words
     * @returns {Promise<void>} settled when the connection is closed
     */
    close(reason?: string): Promise<void>;
    #private;
}
/** The answer to one question: iterate it for deltas and at last the response. */
export class Answer {
    /** @param {Channel} channel @param {Options["onQueue"]} onQueue */
    constructor(channel: Channel, onQueue: Options["onQueue"]);
    isOver: boolean;
    /** @type {Response | null} */ response: Response | null;
    /** @returns {Promise<Response>} once the answer has come to its end */
    finish(): Promise<Response>;
    /** @returns {AsyncGenerator<Delta | Response, void>} */
    [Symbol.asyncIterator](): AsyncGenerator<Delta | Response, void>;
    #private;
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
    /** @param {Channel} channel @param {Created} created @param {Options} options */
    constructor(channel: Channel, created: Created, options: Options);
    created: Created;
    /**
     * Send sound of the utterance; the first begins it. It does not wait: send at the pace of speech.
     * @param {Float32Array | Int16Array} samples any number of them, 16 kHz mono; floats in [-1, 1]
     */
    append(samples: Float32Array | Int16Array): void;
    /** Say that the utterance is over; its `done` comes once all of it is heard. */
    finish(): void;
    /**
     * Hang up; what is not written yet never is, so read up to the last `done` before.
     * @returns {Promise<void>} settled when the connection is closed
     */
    close(): Promise<void>;
    /**
     * @returns {AsyncGenerator<TranscriptEvent, void>} what is written, until `close`
     * @throws {ReportedError} the server does not have the model
     * @throws {SessionClosedError} the server has ended the session
     */
    [Symbol.asyncIterator](): AsyncGenerator<TranscriptEvent, void>;
    #private;
}
/**
 * in `live` only the message tells it
 */
export type QueuePlace = {
    position: number;
    estimated_wait_s: number;
    ticket_id: string;
    queue_length: number;
    message?: string;
};
export type Metrics = Record<string, number | string>;
export type ListenEvent = {
    type: "listen";
    inputId: string;
    metrics: Metrics;
};
export type SpeechEvent = {
    type: "speech";
    text: string;
    audio: Float32Array;
    endOfTurn: boolean;
    responseId: string;
    inputId: string;
    metrics: Metrics;
};
export type ErrorEvent = {
    type: "error";
    code: string;
    message: string;
    sessionId: string;
};
/**
 * the server will shut down
 */
export type GoingAwayEvent = {
    type: "going_away";
    secondsLeft: number;
};
/**
 * what the user said, where the server
 * has a transcriber: words, or a part of one
 */
export type WordsEvent = {
    type: "words";
    text: string;
    startMs: number;
    endMs: number;
};
/**
 * the model calls a tool;
 * `arguments`: a JSON object, as text
 */
export type CallEvent = {
    type: "call";
    id: string;
    name: string;
    arguments: string;
    unit: number;
};
export type ClosedEvent = {
    type: "closed";
    reason: string;
};
export type SessionEvent = ListenEvent | SpeechEvent | CallEvent | ErrorEvent | GoingAwayEvent | WordsEvent | ClosedEvent;
/**
 * takes the arguments, and returns text, or what JSON can
 * hold, or a promise of that
 */
export type ToolFunction = (given: any, call: CallEvent) => unknown;
/**
 * `parameters`: a JSON
 * schema; without `run` the program answers its calls by `giveResult`
 */
export type Tool = ToolFunction | {
    description?: string;
    parameters?: object;
    run?: ToolFunction;
};
export type Usage = {
    prompt_tokens: number;
    completion_tokens: number;
    total_tokens: number;
};
/**
 * `done` ends an utterance
 */
export type TranscriptEvent = {
    type: "delta";
    text: string;
} | ErrorEvent | {
    type: "done";
    text: string;
    usage: Usage;
};
export type Delta = {
    type: "delta";
    text: string;
    audio: Float32Array;
};
/**
 * `toolCalls` are to be run, and
 * their results sent with the next question
 */
export type Response = {
    type: "response";
    text: string;
    audio: Float32Array;
    reason: string;
    responseId: string;
    metrics: Metrics;
    toolCalls: ToolCall[];
};
export type ToolCall = {
    id: string;
    type: "function";
    function: {
        name: string;
        arguments: string;
    };
};
/**
 * `data` may be bytes or samples
 */
export type Content = {
    type: string;
    [field: string]: unknown;
};
export type Message = {
    role: "system" | "user" | "assistant" | "tool";
    content?: string | Content[] | null;
    tool_calls?: ToolCall[];
    tool_call_id?: string;
};
/**
 * `recordingId` and `recordingNotice` are empty where there is none; a
 * transcription does not say `recording`; `tools`: whether the model calls those that it was offered
 */
export type Created = {
    sessionId: string;
    recording?: string;
    recordingId: string;
    recordingNotice: string;
    tools?: "called" | "not_called";
};
export type WebSocketLike = {
    readyState: number;
    bufferedAmount: number;
    binaryType: any;
    send(data: string): void;
    close(code?: number, reason?: string): void;
    addEventListener(type: string, listener: (event: any) => void): void;
};
/**
 * `skipped`: messages to the
 * server that are lost, since more than may be kept had not arrived
 */
export type ConnectionEvent = {
    type: "reconnecting";
    attempt: number;
    waitMs: number;
} | {
    type: "reconnected";
    awayMs: number;
    skipped: number;
};
export type Options = {
    /**
     * what the session carries
     */
    mode: "audio" | "video" | "chat" | "transcription";
    /**
     * `live`: OpenAI's Live API, for mode `audio`, with `model` and
     * without `config`, `voice`, `tools`, `fork`, `onSent`, `interrupt`, `acknowledge` and the reason of a close
     */
    dialect?: "realtime" | "live" | undefined;
    /**
     * of `live`, which needs it, and of a transcription: by a name that the server knows it by;
     * without it a transcription takes the server's
     */
    model?: string | undefined;
    /**
     * the system prompt; in chat a message says it
     */
    instructions?: string | undefined;
    /**
     * inference settings, as on the wire
     */
    config?: object | undefined;
    /**
     * as on the wire
     */
    voice?: {
        ref_audio_base64?: string;
        ref_audio_path?: string;
        tts_ref_audio_base64?: string;
    } | undefined;
    /**
     * functions that the model of a duplex session may call, by name: they run
     * while the session is read, and what they return goes back by itself. In chat each question has its own
     */
    tools?: Record<string, Tool> | undefined;
    /**
     * false: the session is not to be recorded; a server that must refuses
     */
    record?: boolean | undefined;
    /**
     * is told each place in the queue
     */
    onQueue?: ((place: QueuePlace) => void) | undefined;
    /**
     * is told what happens, instead of the iterator
     */
    onEvent?: ((event: any) => void) | undefined;
    /**
     * needed with `onEvent`: the session is over; null: in
     * order
     */
    onEnd?: ((error: Error | null) => void) | undefined;
    /**
     * of a duplex session: is told the name of each append that was
     * sent; `listen` and `speech` bear the name of the append that they answer
     */
    onSent?: ((inputId: string) => void) | undefined;
    /**
     * further attempts where one fails for a reason that may pass (4)
     */
    retries?: number | undefined;
    /**
     * false: a session whose connection is lost is over; otherwise it is resumed
     * where the server can, and only `onConnection` reports it
     */
    resume?: boolean | undefined;
    /**
     * is told when the connection is lost, and back
     */
    onConnection?: ((event: ConnectionEvent) => void) | undefined;
    /**
     * the session begins from the past of a recorded one of the
     * same mode, before a unit or after its last; without `instructions`, `config` and `voice`, which stay as they are
     */
    fork?: {
        recording: string;
        unit?: number;
    } | undefined;
    /**
     * gives up connecting, and waiting in the queue; `connect` throws its reason
     */
    signal?: AbortSignal | undefined;
    /**
     * gives numbers in [0, 1) that shorten the waits between attempts
     */
    random?: (() => number) | undefined;
    /**
     * the API key, where the server asks for one; letters, digits, - and _
     */
    key?: string | undefined;
    /**
     * instead of the global one
     */
    WebSocket?: (new (url: string, protocols?: string[]) => WebSocketLike) | undefined;
};
/**
 * A session's WebSockets, one after the other: its messages wait for their reader.
 *
 * A server that lets a client come back greets each connection (`session.resumable`), and counts in
 * each frame its own (`seq`) and the client's messages (`ack`). What it does not have is kept here; a
 * lost connection is opened again, and what either side has not heard is sent again.
 */
declare class Channel {
    /**
     * @param {(resume: string) => WebSocketLike} connectTo a new session, or one that is resumed
     * @param {{random: () => number, onConnection?: Options["onConnection"]}} options
     */
    constructor(connectTo: (resume: string) => WebSocketLike, { random, onConnection }: {
        random: () => number;
        onConnection?: Options["onConnection"];
    });
    isClosed: boolean;
    hasOpened: boolean;
    closeSent: boolean;
    code: number;
    reason: string;
    /** @type {Promise<void>} */
    ended: Promise<void>;
    socket: WebSocketLike;
    /** Close the connection, and come back no more. @param {number} [code] */
    leave(code?: number): void;
    /** @param {Error} failure */
    fail(failure: Error): void;
    /** @returns {Promise<any>} the next event; null after the last of a session that ended in order */
    receive(): Promise<any>;
    /** @param {object} message */
    send(message: object): void;
    /** @param {string} [reason] @returns {Promise<void>} settled when the connection is closed */
    close(reason?: string): Promise<void>;
    /** @returns {Promise<void>} settled when the connection is closed; of a protocol without a goodbye */
    hangUp(): Promise<void>;
    #private;
}
export {};
