/* The head of the page: what happened, in a line or two. */

import { marksOf } from "./data.js";
import { count, many, span } from "./format.js";

const ENDS = {
  client: ["good", "ended by the client"],
  answered: ["good", "answered"],
  rejected: ["warn", "the request was refused"],
  timeout: ["warn", "its time was up"],
  pause_timeout: ["warn", "paused for too long"],
  context_full: ["warn", "the context was full"],
  backend_error: ["bad", "the model failed"],
  server_shutdown: ["warn", "the server shut down"],
  cancelled: ["warn", "cancelled by an operator"],
  invalid_frame: ["bad", "an invalid frame"],
  refused: ["warn", "refused"],
  peer_gone: ["warn", "the client was gone"],
  broken_off: ["bad", "broken off"],
};
const TITLE_CHARS = 60;
const TITLE_PIECES = 20;
const VERDICTS = {
  identical: ["good", "replays as recorded"],
  diverged: ["finding", "replay diverges"],
  damaged: ["bad", "the log is damaged"],
};

/** Fill in the head. */
export function showHeader(page, session) {
  const { story } = session;
  const name = story.recording_id ?? "a session";
  const title = titleOf(story);
  document.title = `${title || name} · Antiphon`;
  page.querySelector("#title").textContent = title;
  page.querySelector("#name").textContent = name;
  page.querySelector("#pills").replaceChildren(...pills(story));
  page.querySelector("#facts").replaceChildren(...facts(session));
  page.querySelector("#sentence").textContent = sentence(session);
}

/** When a session began, and its first words; empty where neither is known. */
function titleOf({ wall_ms: began, said }) {
  const ordered = [...said].sort((one, other) => one.begin - other.begin).filter(({ text }) => text.trim());
  const parted = (at) => (ordered[at - 1]?.voice === ordered[at].voice ? " " : " – ");
  const text = ordered.slice(0, TITLE_PIECES).reduce((all, it, at) => all + (at ? parted(at) : "") + it.text.trim(), "");
  const shown = text.length > TITLE_CHARS ? `${text.slice(0, TITLE_CHARS).trimEnd()}…` : text;
  const moment = began === null ? "" : new Date(began).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  return [moment, shown && `“${shown}”`].filter(Boolean).join("  ");
}

function pills({ end, verdict, compared, damage_count: damages }) {
  const isKnown = end.reason !== null && Object.hasOwn(ENDS, end.reason);
  const other = end.reason === null ? "not ended, as far as the log goes" : end.reason;
  const [tone, words] = isKnown ? ENDS[end.reason] : ["warn", other];
  const all = [[tone, words]];
  if (!end.finished && end.reason !== null) all.push(["warn", "the log has no end"]);
  if (verdict !== null) all.push(VERDICTS[verdict]);
  else if (damages) all.push(VERDICTS.damaged);
  if (compared !== null) {
    const { name, differences } = compared;
    all.push(differences ? ["finding", `differs from ${name}`] : ["good", `the same as ${name}`]);
  }
  return all.map(([each, text]) => {
    const made = document.createElement("span");
    made.className = `pill ${each}`;
    made.textContent = text;
    return made;
  });
}

function facts({ story }) {
  const told = [
    ["mode", story.mode],
    ["model", story.model],
    ["protocol", story.dialect],
    ["user’s words by", story.transcriber || null],
    ["length", span(story.duration)],
    [
      "begun",
      story.wall_ms === null
        ? null
        : new Date(story.wall_ms).toISOString().replace("T", " ").slice(0, 19) + " UTC",
    ],
    ["seed", story.seed],
  ];
  return told
    .filter(([, value]) => value !== null && value !== undefined)
    .map(([name, value]) => {
      const made = document.createElement("div");
      const term = document.createElement("dt");
      const is = document.createElement("dd");
      term.textContent = name;
      is.textContent = String(value);
      made.append(term, is);
      return made;
    });
}

function sentence(session) {
  const { story, later } = session;
  const { units, turns, drops, errors, findings, shortened, playback } = story;
  const times = (outcome) => units.filter((unit) => unit.outcome === outcome).length;
  const told = [];
  if (units.length) {
    const outcomes = [
      ["listen", "listened"],
      ["speech", "spoke"],
      ["withheld", "interrupted"],
      ["failed", "failed"],
      ["context_full", "did not fit"],
      ["ended", "too late"],
      ["lost", "lost with the worker"],
      ["pending", "without a result"],
    ];
    const parts = outcomes
      .map(([outcome, word]) => [times(outcome), word])
      .filter(([number]) => number);
    const words = parts.map(([number, word]) => `${count(number)} ${word}`);
    told.push(`${many(units.length, "unit")}: ${words.join(", ")}`);
  }
  if (turns.length) told.push(many(turns.length, "turn"));
  told.push(`${many(story.frames_received, "frame")} received, ${count(story.frames_sent)} sent`);
  if (shortened.length) told.push(`${count(shortened.length)} kept shortened, for they were refused`);
  if (drops.length) told.push(`${many(drops.length, "second")} of input dropped`);
  if (playback.length) {
    const behindMs = Math.max(...playback.map(({ behind_ms }) => behind_ms));
    told.push(`playback at most ${span(behindMs / 1e3)} behind`);
  }
  if (errors.length) told.push(many(errors.length, "error"));
  const marks = marksOf(session).length;
  if (marks) told.push(many(marks, "mark"));
  if (later.damaged) told.push(`${many(later.damaged, "mark")} next to the log cannot be read`);
  if (findings.length) told.push(many(findings.length, "difference"));
  if (story.damage_count) told.push(`damaged ${many(story.damage_count, "time")}: there are gaps`);
  if (story.pictures_left_out)
    told.push(`${many(story.pictures_left_out, "picture")} left out here`);
  if (story.sound_left_out_s) told.push(`${span(story.sound_left_out_s)} of sound left out here`);
  return `${told.join(" · ")}`;
}
