// Recordings: a table of the sessions that were recorded, to open, to keep and to remove.

import { ApiError, ask, askJson, key, save } from "./api.js";
import { duration, field, fill, h, notice, select, size, when } from "./dom.js";
import { endedHow } from "./words.js";

const PAGE = 50;
const DAY_MS = 86_400_000;
/** @type {[string, string][]} */
const MODES = [
  ["", "All modes"],
  ["audio", "Audio"],
  ["video", "Video"],
  ["chat", "Chat"],
  ["transcription", "Transcription"],
];
/** @type {[string, string][]} */
const STATES = [
  ["", "All"],
  ["finished", "Finished"],
  ["open", "Running"],
  ["crashed", "Crashed"],
  ["unreadable", "Unreadable"],
];
/** @type {[string, string][]} */
const SINCE = [
  ["", "Any time"],
  ["1", "The last day"],
  ["7", "The last week"],
  ["30", "The last month"],
];

/** @param {import("./main.js").App} app @returns {import("./main.js").Page} */
export function recordingsPage(app) {
  const page = new RecordingsPage(app);
  return { element: page.element, show: () => page.load() };
}

class RecordingsPage {
  #app;
  #mode = this.#filter(MODES);
  #state = this.#filter(STATES);
  #since = this.#filter(SINCE);
  #session = h("input", {
    type: "search",
    placeholder: "sess_…",
    autocomplete: "off",
    spellcheck: false,
    onchange: () => this.load(),
  });
  #owner = h("input", { type: "search", autocomplete: "off", spellcheck: false, onchange: () => this.load() });
  #rows = h("tbody", {});
  #count = h("p", { class: "soft small", role: "status" });
  #more = h("button", { type: "button", hidden: true, onclick: () => this.#load(this.#next) }, "Show more");
  #notice = notice("bad");
  #next = "";
  #asked = 0;
  #shown = 0;

  /** @param {import("./main.js").App} app */
  constructor(app) {
    this.#app = app;
    const { key: own, recording } = app.facts;
    const names = [
      "Began",
      "Mode",
      own.is_admin && own.is_needed && "Owner",
      "Length",
      "Content",
      "Ended",
      "Size",
    ].filter(Boolean);
    const heading = (/** @type {any} */ name) =>
      h("th", { scope: "col", class: name === "Length" || name === "Size" ? "number" : undefined }, name);
    this.element = h(
      "section",
      { "aria-label": "Recordings" },
      h(
        "div",
        { class: "head-row" },
        h("h1", {}, "Recordings"),
        field("Mode", this.#mode),
        field("State", this.#state),
        field("Since", this.#since),
        own.is_admin && own.is_needed && field("Owner", this.#owner),
        field("Session", this.#session),
        h("button", { type: "button", onclick: () => this.load() }, "Refresh"),
      ),
      this.#notice.element,
      h(
        "div",
        { class: "card scroll" },
        h(
          "table",
          { class: "cards" },
          h(
            "thead",
            {},
            h("tr", {}, ...names.map(heading), h("th", { scope: "col", "aria-label": "Actions" })),
          ),
          this.#rows,
        ),
      ),
      h("div", { class: "row under" }, this.#count, this.#more),
      recording.has_views &&
        key.get() &&
        h(
          "p",
          { class: "soft small" },
          "A recording opens in a tab of its own, for which the browser asks: any name, and your key as the password.",
        ),
    );
  }

  /** @param {[string, string][]} options */
  #filter(options) {
    return select(options, { onchange: () => this.load() });
  }

  load() {
    return this.#load("");
  }

  /** @param {string} after the page before; empty for the first */
  async #load(after) {
    const asked = ++this.#asked;
    const query = new URLSearchParams({ limit: String(PAGE) });
    const wanted = {
      mode: this.#mode.value,
      state: this.#state.value,
      session: this.#session.value.trim(),
      owner: this.#owner.value.trim(),
      after,
    };
    for (const [name, value] of Object.entries(wanted)) if (value) query.set(name, value);
    if (this.#since.value) query.set("since_ms", String(Date.now() - Number(this.#since.value) * DAY_MS));
    try {
      const { recordings, next } = await askJson(`/api/recordings?${query}`);
      if (asked !== this.#asked) return; // a later question was asked meanwhile
      const rows = recordings.map((/** @type {any} */ it) => this.#row(it));
      if (after) this.#rows.append(...rows);
      else
        fill(
          this.#rows,
          ...(rows.length
            ? rows
            : [h("tr", {}, h("td", { class: "nothing wide", colSpan: 9 }, "There are no such recordings."))]),
        );
      this.#shown = (after ? this.#shown : 0) + rows.length;
      this.#next = next ?? "";
      this.#more.hidden = !next;
      this.#count.textContent = this.#shown ? `${this.#shown} shown${next ? ", and there are more" : ""}.` : "";
      this.#notice.say("");
    } catch (error) {
      if (asked === this.#asked) this.#notice.say(/** @type {ApiError} */ (error).message);
    }
  }

  /** @param {any} it a recording */
  #row(it) {
    const { key: own, recording } = this.#app.facts;
    const cell = (/** @type {string} */ name, /** @type {string} */ text, kind = "") =>
      h("td", { class: kind || undefined, "data-name": name }, text);
    const tone = { open: "good", crashed: "bad", unreadable: "bad" }[/** @type {string} */ (it.state)] ?? "";
    return h(
      "tr",
      {},
      h("td", { "data-name": "Began", title: it.recording_id }, it.began_ms === null ? "–" : when(it.began_ms)),
      cell("Mode", it.mode ?? "–"),
      own.is_admin && own.is_needed && cell("Owner", it.owner || "–"),
      cell("Length", it.duration_ms === null ? "–" : duration(it.duration_ms), "number"),
      cell("Content", content(it)),
      h("td", { "data-name": "Ended", class: tone || undefined }, endedHow(it)),
      cell("Size", size(it.file_bytes), "number"),
      h("td", { class: "actions" }, ...this.#actions(it, recording.has_views, own.is_admin)),
    );
  }

  /** @param {any} it @param {boolean} hasViews @param {boolean} isAdmin */
  #actions(it, hasViews, isAdmin) {
    const path = `/api/recordings/${encodeURIComponent(it.recording_id)}`;
    const name = it.began_ms === null ? it.recording_id : when(it.began_ms);
    const isReadable = it.state !== "unreadable";
    return [
      hasViews &&
        isReadable &&
        h(
          "a",
          {
            class: "button",
            href: `${path}/view`,
            target: "_blank",
            rel: "noopener",
            "aria-label": `Open the recording of ${name}`,
          },
          "Open",
        ),
      h(
        "button",
        {
          type: "button",
          "aria-label": `Download the log of ${name}`,
          onclick: () => this.#save(`${path}/log`, `${it.recording_id}.session.zst`),
        },
        "Download",
      ),
      isAdmin &&
        h(
          "button",
          {
            type: "button",
            class: "danger",
            disabled: it.state === "open",
            "aria-label": `Delete the recording of ${name}`,
            onclick: (/** @type {Event} */ event) =>
              this.#remove(/** @type {HTMLButtonElement} */ (event.target), path),
          },
          "Delete",
        ),
    ].filter(Boolean);
  }

  /** @param {string} path @param {string} name */
  async #save(path, name) {
    try {
      await save(path, name);
    } catch (error) {
      this.#notice.say(/** @type {ApiError} */ (error).message);
    }
  }

  /** The first click asks, the second one removes. @param {HTMLButtonElement} button @param {string} path */
  async #remove(button, path) {
    if (button.textContent === "Delete") {
      button.textContent = "Really delete?";
      return void button.addEventListener("blur", () => (button.textContent = "Delete"), { once: true });
    }
    button.disabled = true;
    try {
      await ask(path, { method: "DELETE" });
      button.closest("tr")?.remove();
      this.#shown -= 1;
      this.#count.textContent = `Deleted. ${this.#shown} shown.`;
    } catch (error) {
      button.disabled = false;
      this.#notice.say(/** @type {ApiError} */ (error).message);
    }
  }
}

/** @param {any} recording */
function content({ units, turns, chunks }) {
  const told = /** @type {[number | null, string][]} */ ([
    [units, "second"],
    [turns, "turn"],
    [chunks, "second heard"],
  ])
    .filter(([count]) => count)
    .map(([count, name]) => `${count} ${count === 1 ? name : name.replace(/^\w+/, "$&s")}`);
  return told.join(", ") || "–";
}
