// What the page says of states, ends and errors, and what a user may say to the models that are known.

import { sentence } from "./api.js";

/** @type {Record<string, string>} */
export const STATES = {
  idle: "Ready when you are",
  opening: "Asking your browser for the microphone…",
  connecting: "Connecting…",
  queued: "Waiting for a free slot…",
  listening: "Listening",
  speaking: "Speaking",
  reconnecting: "The connection is lost. Coming back…",
  ended: "The conversation is over",
};

/** @type {Record<string, string>} Whether a conversation is recorded, as the server says. */
export const RECORDED = {
  on: "This conversation is recorded.",
  off: "This conversation is not recorded.",
  failed: "The recording has failed.",
};

/** Before the first words of a conversation. */
export const WORDS = {
  both: "Your words and the model’s appear here. Interrupt it whenever you like: it listens while it talks.",
  model:
    "The model’s words appear here; yours do not, for the server has no transcriber (--transcriber). Interrupt the model whenever you like: it listens while it talks.",
};

export const ECHO =
  "The model hears itself: your microphone picks up the loudspeaker. Use headphones, or turn the volume down.";

/** @type {Record<string, string>} Why a session ended, by its reason on the wire. */
const ENDS = {
  stopped: "You ended the conversation.",
  timeout: "The session came to the end of its time.",
  context_full: "The model’s context is full: a new conversation begins with an empty one.",
  server_shutdown: "The server is shutting down.",
  backend_error: "The model failed.",
  cancelled: "The place in the queue was cancelled.",
  pause_timeout: "The session was paused for too long.",
  idle: "Nothing was said for too long.",
  flooded: "More was sent than a session may send.",
  lost: "The connection was lost.",
};

/** @param {string} reason @param {Error | null} error */
export function endOf(reason, error) {
  if (error) return sentence(error.message);
  return ENDS[reason] ?? `The session ended: ${reason}.`;
}

/** @type {Record<string, string>} The same for a table. */
const ENDED = {
  client: "by the client",
  peer_gone: "connection closed",
  timeout: "time was up",
  context_full: "context full",
  server_shutdown: "server shut down",
  backend_error: "the model failed",
  pause_timeout: "paused too long",
  idle: "silence",
};

/** How a recording ended, in a word or two. @param {any} recording */
export function endedHow({ state, reason }) {
  if (state === "open") return "runs";
  if (state === "finished") return reason ? (ENDED[reason] ?? String(reason).replaceAll("_", " ")) : "finished";
  return state;
}

/** @type {Record<string, string>} The inference settings in a speaker's words; a tooltip has the model's. */
export const SETTINGS = {
  generate_audio: "Speak aloud",
  force_listen_count: "Only listens at first (seconds)",
  max_new_speak_tokens_per_chunk: "Words in a second, at most (tokens)",
  temperature: "Surprise in its words",
  top_k: "Words it chooses from",
  top_p: "Share of likely words",
  listen_prob_scale: "Patience (prefers to listen)",
  length_penalty: "Urge to finish",
  sliding_window: "When its memory is full",
  max_slice_nums: "Detail of pictures (parts)",
  decode_mode: "Choice of words",
  max_new_tokens: "Longest answer (tokens)",
  min_new_tokens: "Shortest answer (tokens)",
  repetition_penalty: "Aversion to repeating",
  do_sample: "Vary its answers",
};

/** @type {Record<string, string>} The values of those that are words. */
export const VALUES = {
  off: "End the conversation",
  basic: "Forget the oldest",
  context: "Keep the oldest as text",
  sampling: "With surprises",
  greedy: "Always the likeliest",
};

/** @type {Record<string, string>} In what two recordings differ; the hidden ones are for `antiphon diff`. */
export const DIFFERENCES = {
  input_hash: "what you said or showed",
  outcome: "whether the model spoke",
  decided_ids: "what the model decided",
  fed_ids: "what the model read",
  codec_ids: "the model’s voice",
  text: "the model’s words",
  streamed: "the model’s words",
  pcm: "the model’s sound",
  end_of_turn: "where the model finished",
  cut: "where the model was interrupted",
  forced: "whether the model had to listen",
};

/** @type {Record<string, string[]>} What models understand that understand little, by their names. */
export const HINTS = {
  tiny: [
    "Hello Antiphon",
    "What time is it?",
    "Tell me a joke",
    "How are you today?",
    "Play some music",
    "Count to three",
    "What can you do?",
    "Read me the news",
  ],
};
/** With a camera or a screen, in addition. */
export const SEEING = { tiny: "What do you see?" };
