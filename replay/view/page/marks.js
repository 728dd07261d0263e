/* Where a server shows this session: its marks are written and removed, and it is replayed. */

import { clock } from "./format.js";

const TONES = { identical: "good", diverged: "finding", damaged: "bad", not_comparable: "warn" };

/** Where a new mark stands: the selected part, else the moment of the player. In milliseconds. */
export function placeOfMark(range, now) {
  const ms = (time) => Math.round(time * 1000);
  return range ? { at_ms: ms(range.begin), end_ms: ms(range.end) } : { at_ms: ms(now), end_ms: ms(now) };
}

export class Marks {
  /** `on.place()` gives where a new mark stands, `on.changed()` is told when the marks are others, and
   * `on.found(replay)` what a replay has found. */
  constructor(page, session, on) {
    this.page = page;
    this.session = session;
    this.on = on;
    const { writes } = session.later;
    const id = location.pathname.split("/")[3]; // of the recording, or of its session
    this.recording = `/api/recordings/${id}`;
    this.running = `/api/sessions/${id}/marks`;
    this.desk = page.querySelector("#desk");
    this.text = page.querySelector("#mark-text");
    this.key = page.querySelector("#mark-key");
    this.problem = page.querySelector("#mark-problem");
    this.save = page.querySelector("#mark-save");
    this.opener = page.querySelector("#write");
    this.opener.hidden = !writes;
    page.querySelector("#mark-key-field").hidden = !session.later.asks_key;
    page.querySelector("#replay").hidden = writes !== "file";
    if (!writes) return;
    const click = (element, action) => element.addEventListener("click", action);
    click(this.opener, () => this.open());
    this.desk.addEventListener("submit", (event) => {
      event.preventDefault();
      this.write();
    });
    click(page.querySelector("#mark-cancel"), () => this.close());
    click(page.querySelector("#replay"), () => this.replay());
    this.desk.addEventListener("keydown", (event) => this.pressed(event));
  }

  /** Begin a mark. */
  open() {
    if (this.opener.hidden) return;
    this.desk.hidden = false;
    this.showPlace();
    this.text.focus();
  }

  /** Say where the mark stands. */
  showPlace() {
    if (this.desk.hidden) return;
    const { at_ms: at, end_ms: end } = this.on.place();
    const place = end > at ? `${clock(at / 1e3, 2)} to ${clock(end / 1e3, 2)}` : `at ${clock(at / 1e3, 2)}`;
    const isRunning = this.session.later.writes === "log";
    this.page.querySelector("#mark-place").textContent = isRunning ? "Mark of the running session, now" : `Mark ${place}`;
  }

  close() {
    this.desk.hidden = true;
    this.problem.textContent = "";
    this.opener.focus();
  }

  pressed(event) {
    event.stopPropagation(); // the page's own keys are letters
    if (event.key === "Escape") this.close();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.write();
  }

  async write() {
    if (this.save.disabled) return; // it is being written
    const text = this.text.value.trim();
    if (!text) return this.say("Write something first.");
    const { later, story } = this.session;
    const isRunning = later.writes === "log";
    this.save.disabled = true;
    const made = isRunning
      ? await this.ask("POST", this.running, { text })
      : await this.ask("POST", `${this.recording}/marks`, { ...this.on.place(), text });
    this.save.disabled = false;
    if (!made) return;
    if (isRunning) story.marks.push({ at: made.at_ms / 1e3, kind: "mark", seq: made.seq, fields: { text } });
    else later.marks.push({ ...made, is_removable: true });
    this.text.value = "";
    this.close();
    this.on.changed();
  }

  async remove(number) {
    if (!(await this.ask("DELETE", `${this.recording}/marks/${number}`))) return;
    this.session.later.marks = this.session.later.marks.filter((mark) => mark.number !== number);
    this.close();
    this.on.changed();
  }

  async replay() {
    const button = this.page.querySelector("#replay");
    button.disabled = true;
    this.on.found({ tone: "", title: "The server replays it…", lines: [] });
    const found = await this.ask("GET", `${this.recording}/replay`, undefined, (text) =>
      this.on.found({ tone: "bad", title: text, lines: [] }),
    );
    button.disabled = false;
    if (!found) return;
    const [verdict, ...lines] = found.lines; // as `antiphon replay` prints them
    this.on.found({ ...found, tone: TONES[found.result], title: `Replay: ${verdict}`, lines });
  }

  /* Ask the server; null where that fails, which is said. */
  async ask(method, path, body, say = (text) => this.say(text)) {
    const key = this.key.value.trim();
    if (method !== "GET" && this.session.later.asks_key && !key) {
      say("This takes your key.");
      this.key.focus();
      return null;
    }
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    try {
      // The page's own address may hold a name and a key, which `fetch` refuses.
      const answer = await fetch(`${location.origin}${path}`, { method, headers, body: body && JSON.stringify(body) });
      if (answer.status === 204) return {};
      if (answer.status === 401) return say("The server does not know this key."), null;
      const said = await answer.json();
      if (answer.ok) return said;
      say(`${said.message[0].toUpperCase()}${said.message.slice(1)}.`);
    } catch {
      say("The server does not answer.");
    }
    return null;
  }

  say(text) {
    this.desk.hidden = false;
    this.problem.textContent = text;
  }
}
