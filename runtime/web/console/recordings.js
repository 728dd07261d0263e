// Recordings: a table of the sessions that were recorded, to open, to keep and to remove.

import { ApiError, ask, askJson, key, save } from "./api.js";
import { Digests, firstWords, passageWith } from "./digests.js";
import { actionsOf, nameOf, pageLink } from "./actions.js";
import { button, duration, field, fill, h, notice, select, size, spoken } from "./dom.js";
import { Selection } from "./selection.js";
import { endedHow } from "./words.js";

const PAGE = 50;
const SORTED_MAX = 1000; // rows that are loaded to be sorted
const TYPING_MS = 300; // a search begins when its user pauses
const NUMBERS = new Set(["Length", "Size", "Delay", "Dropped"]);
const DAY_MS = 86_400_000;
/** @type {Record<string, (it: any) => number | string | null | undefined>} What a column is sorted by. */
const SORTS = {
  Began: (it) => it.began_ms,
  Mode: (it) => it.mode,
  Owner: (it) => it.owner,
  Length: (it) => it.duration_ms,
  Delay: (it) => it.delay_s,
  Dropped: (it) => it.dropped,
  Ended: endedHow,
  Size: (it) => it.file_bytes,
};
/** These are read from each recording. */
const READ = ["Delay", "Dropped"];
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
    oninput: () => this.#soon(),
  });
  #text = h("input", {
    type: "search",
    placeholder: "in what was said",
    autocomplete: "off",
    oninput: () => this.#soon(),
  });
  #digests = new Digests();
  #selection;
  #owner = h("input", { type: "search", autocomplete: "off", spellcheck: false, oninput: () => this.#soon() });
  #rows = h("tbody", {});
  #count = h("p", { class: "soft small", role: "status" });
  #more = button("Show more", () => this.#load(this.#next), { hidden: true });
  #notice = notice("bad");
  #next = "";
  #asked = 0;
  #typing = 0;
  #shown = 0;
  #read = 0;
  #seen = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) if (isIntersecting) this.#preview(target);
  });
  /** @type {WeakMap<Element, any>} */ #recordings = new WeakMap();
  /** @type {Map<string, any>} */ #headings = new Map();
  /** The server's own order is the newest first. */ #sorted = { name: "Began", isRising: false };

  /** @param {import("./main.js").App} app */
  constructor(app) {
    this.#app = app;
    const { key: own, recording } = app.facts;
    this.#selection = new Selection(this.#rows, {
      compares: recording.has_views,
      removes: own.is_admin,
      remove: (row) => this.#delete(row),
      onFailure: (text) => this.#notice.say(text),
    });
    const names = [
      "Began",
      "Mode",
      own.is_admin && own.is_needed && "Owner",
      "Length",
      recording.has_views && "First words",
      recording.has_views && "Delay",
      recording.has_views && "Dropped",
      "Ended",
      "Size",
    ].filter(Boolean);
    const heading = (/** @type {any} */ name) => {
      const text = name in SORTS ? button(name, () => this.#sortBy(name), { class: "quiet sort" }) : name;
      const made = h("th", { scope: "col", class: NUMBERS.has(name) ? "number" : undefined }, text);
      this.#headings.set(name, made);
      return made;
    };
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
        recording.has_views && field("Words", this.#text),
        button("Refresh", () => this.load()),
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
            h(
              "tr",
              {},
              h("th", { scope: "col", class: "pick" }, this.#selection.all),
              ...names.map(heading),
              h("th", { scope: "col" }, spoken("Actions")),
            ),
          ),
          this.#rows,
        ),
      ),
      this.#selection.element,
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

  /** Sort all that were chosen, also those that are not shown yet; again by the same column: the other way round. @param {string} name */
  async #sortBy(name) {
    const isFirst = this.#sorted.name !== name;
    const isRising = isFirst ? !NUMBERS.has(name) && name !== "Began" : !this.#sorted.isRising;
    const sorted = (this.#sorted = { name, isRising });
    this.#sort();
    for (let after = ""; this.#next && this.#next !== after && this.#shown < SORTED_MAX; ) {
      after = this.#next; // the same once more: it could not be loaded
      await this.#load(after);
      if (this.#sorted !== sorted) return;
    }
    if (READ.includes(name)) for (const row of this.#rows.children) this.#preview(row);
  }

  /** Bring the rows that are shown into order; those without a value are the last. */
  #sort() {
    const { name, isRising } = this.#sorted;
    for (const [column, it] of this.#headings) {
      if (column === name) it.setAttribute("aria-sort", isRising ? "ascending" : "descending");
      else it.removeAttribute("aria-sort");
    }
    const value = (/** @type {Element} */ row) => SORTS[name](this.#recordings.get(row)) ?? null;
    const rows = [...this.#rows.children].filter((row) => this.#recordings.has(row));
    rows.sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      if (a === b) return 0;
      if (a === null || b === null) return a === null ? 1 : -1;
      return (a < b ? -1 : 1) * (isRising ? 1 : -1);
    });
    if (rows.some((row, i) => row !== this.#rows.children[i])) this.#rows.append(...rows); // else a focus would be lost
  }

  #soon() {
    clearTimeout(this.#typing);
    this.#typing = window.setTimeout(() => this.load(), TYPING_MS);
  }

  load() {
    this.#selection.clear();
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
    const text = this.#text.value.trim();
    this.#count.ariaBusy = String(Boolean(text)); // each recording that is searched is not read aloud
    if (!after) [this.#shown, this.#read] = [0, 0];
    try {
      const { recordings, next } = await askJson(`/api/recordings?${query}`);
      if (asked !== this.#asked) return; // a later question was asked meanwhile
      if (!after) fill(this.#rows);
      this.#next = next ?? "";
      this.#more.hidden = !next;
      this.#notice.say("");
      await (text ? this.#search(recordings, text, asked) : this.#list(recordings));
      if (asked === this.#asked) this.#tell(text ? `${this.#read} searched, ` : "");
    } catch (error) {
      if (asked !== this.#asked) return;
      this.#notice.say(/** @type {ApiError} */ (error).message);
      this.#count.textContent = "";
      if (!after) fill(this.#rows); // what was there is not what was asked for
    }
  }

  /** @param {any[]} recordings */
  #list(recordings) {
    this.#shown += recordings.length;
    this.#rows.append(...recordings.map((it) => this.#row(it)));
    this.#sort();
  }

  /** Read one recording after the other, and show those with the text. @param {any[]} recordings @param {string} text @param {number} asked */
  async #search(recordings, text, asked) {
    for (const it of recordings) {
      const digest = await this.#digests.of(it, () => asked === this.#asked);
      if (asked !== this.#asked) return;
      this.#read += 1;
      const found = digest && passageWith(digest, text);
      if (found) {
        this.#shown += 1;
        this.#rows.append(this.#row(it, found));
        this.#sort();
      }
      this.#count.textContent = `${this.#read} searched, ${this.#shown} found…`;
    }
  }

  /** @param {string} before */
  #tell(before) {
    if (!this.#shown)
      fill(
        this.#rows,
        h("tr", {}, h("td", { class: "nothing wide", colSpan: 11 }, ...this.#nothing())),
      );
    const more = this.#next ? ", and there are more" : "";
    this.#count.ariaBusy = "false";
    this.#count.textContent = this.#shown || before ? `${before}${this.#shown} shown${more}.` : "";
  }

  get #filters() {
    return [this.#mode, this.#state, this.#since, this.#session, this.#owner, this.#text];
  }

  /** Why there is no row. */
  #nothing() {
    if (this.#filters.some((it) => it.value.trim())) {
      const unfilter = () => (this.#filters.forEach((it) => (it.value = "")), this.load());
      return ["No recording is like this. ", button("Show all", unfilter)];
    }
    const text = "Nothing is recorded yet. Talk to the model, and what was said is here.";
    return [h("p", {}, text), h("a", { class: "button primary", href: "#talk" }, "Talk")];
  }

  /** @param {any} it a recording @param {{atMs: number, text: string} | null} [found] what was searched for */
  #row(it, found = null) {
    const { key: own, recording } = this.#app.facts;
    const cell = (/** @type {string} */ name, /** @type {string} */ text, kind = "") =>
      h("td", { class: kind || undefined, "data-name": name }, text);
    const tone = { open: "good", crashed: "bad", unreadable: "bad" }[/** @type {string} */ (it.state)] ?? "";
    const told = recording.has_views ? [this.#words(it, found), cell("Delay", "", "number"), cell("Dropped", "", "number")] : [];
    const row = h(
      "tr",
      {},
      h("td", { class: "pick" }, this.#selection.picker(it)),
      h("td", { "data-name": "Began", title: it.recording_id }, pageLink(it, recording.has_views, nameOf(it)) ?? nameOf(it)),
      cell("Mode", it.mode ?? "–"),
      own.is_admin && own.is_needed && cell("Owner", it.owner || "–"),
      h(
        "td",
        { "data-name": "Length", class: "number", title: content(it) },
        it.duration_ms === null ? "–" : duration(it.duration_ms),
      ),
      ...told,
      h("td", { "data-name": "Ended", class: tone || undefined }, endedHow(it)),
      cell("Size", size(it.file_bytes), "number"),
      h("td", { class: "actions" }, ...actionsOf(it, { hasViews: recording.has_views, isAdmin: own.is_admin }, this.#on)),
    );
    this.#recordings.set(row, it);
    if (recording.has_views && it.state !== "unreadable") this.#seen.observe(row);
    return row;
  }

  /** @param {any} it @param {{atMs: number, text: string} | null} found */
  #words(it, found) {
    const link = found && pageLink(it, true, found.text, `#t=${found.atMs / 1000}`);
    return h("td", { "data-name": "First words", class: "words wide" }, link);
  }

  /** Read what a row lacks, while it is in view. @param {Element} row */
  async #preview(row) {
    this.#seen.unobserve(row);
    const wants = () => row.isConnected && !this.element.hidden && this.#recordings.has(row);
    const digest = await this.#digests.of(this.#recordings.get(row), wants);
    if (!digest) return void (row.isConnected && this.element.hidden && this.#seen.observe(row)); // later
    const { response_delay: delay, chat_response_delay: waited, word_delay: late, dropped_units: dropped } = digest.measures;
    const put = (/** @type {string} */ name, /** @type {string} */ text) => {
      const cell = row.querySelector(`[data-name="${name}"]`);
      if (cell && !cell.textContent) cell.textContent = text;
    };
    const shown = delay ?? waited ?? late;
    Object.assign(this.#recordings.get(row) ?? {}, { delay_s: shown, dropped });
    put("First words", firstWords(digest) || "–");
    put("Delay", shown === undefined ? "–" : `${shown.toFixed(2)} s`);
    put("Dropped", dropped === undefined ? "–" : `${dropped} s`);
    if (READ.includes(this.#sorted.name)) this.#sort();
  }

  /** Remove a recording and its row. @param {Element} row @returns {Promise<string>} why it was not; empty if it was */
  async #delete(row) {
    const recording = this.#recordings.get(row);
    this.#recordings.delete(row); // it is read no more
    await this.#digests.reading;
    try {
      await ask(`/api/recordings/${encodeURIComponent(recording.recording_id)}`, { method: "DELETE" });
    } catch (error) {
      this.#recordings.set(row, recording);
      return /** @type {ApiError} */ (error).message;
    }
    row.remove();
    this.#selection.drop(recording.recording_id);
    this.#shown -= 1;
    this.#count.textContent = `Deleted. ${this.#shown} shown.`;
    return "";
  }

  #on = {
    save: (/** @type {string} */ path, /** @type {string} */ name) => this.#save(path, name),
    remove: (/** @type {HTMLButtonElement} */ button) => this.#remove(button),
  };

  /** @param {string} path @param {string} name */
  async #save(path, name) {
    try {
      await save(path, name);
    } catch (error) {
      this.#notice.say(/** @type {ApiError} */ (error).message);
    }
  }

  /** The first click asks, the second one removes. @param {HTMLButtonElement} button */
  async #remove(button) {
    if (button.textContent === "Delete") {
      button.textContent = "Really delete?";
      return void button.addEventListener("blur", () => (button.textContent = "Delete"), { once: true });
    }
    button.disabled = true;
    const failure = await this.#delete(/** @type {Element} */ (button.closest("tr")));
    button.disabled = false;
    this.#notice.say(failure);
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
