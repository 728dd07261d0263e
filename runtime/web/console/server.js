// Server: how it stands, for its operators: sessions, the queue, workers, and what was refused.

import { ApiError, ask, askJson } from "./api.js";
import { Graph } from "./graph.js";
import { dialog, duration, fill, h, notice, size, spoken } from "./dom.js";

const LOOK_MS = 2000;
/** While another page is shown: the graphs go on. */
const ASIDE_MS = 10_000;
/** @type {[string, string][]} The graphs: names, and what they count. */
const GRAPHS = [
  ["Sessions", "sessions that run; the dashed line is the number of slots"],
  ["Waiting", "sessions and turns that wait for a slot"],
  ["Dropped seconds", "seconds of the running sessions that came too fast for the model"],
  ["KV tokens", "tokens of the running sessions in the model’s cache"],
];

/** @param {import("./main.js").App} app @returns {import("./main.js").Page} */
export function serverPage(app) {
  const page = new ServerPage(app);
  return { element: page.element, show: () => page.follow(), hide: () => page.rest() };
}

class ServerPage {
  #tiles = h("dl", { class: "tiles", "aria-label": "Now" });
  #sessions = table("Sessions", ["Session", "Mode", "Owner", "State", "Age", "Units", "Dropped", "KV tokens"]);
  #queue = table("Queue", ["Place", "Mode", "Owner", "Waited", "Expected", ""]);
  #workers = table("Workers", ["Worker", "State", "Slots in use", "Age", ""]);
  #refused = h("p", { class: "soft" });
  #notice = notice("bad");
  #graphs = GRAPHS.map(([name, note]) => new Graph(name, note));
  #timer = 0;
  #isShown = false;
  #app;
  #drain = h("button", { type: "button", class: "danger", onclick: () => this.#askToDrain() }, "Drain the server…");

  /** @param {import("./main.js").App} app */
  constructor(app) {
    this.#app = app;
    this.element = h(
      "section",
      { class: "stack", "aria-label": "Server" },
      h(
        "div",
        { class: "head-row" },
        h("h1", {}, "Server"),
        h("a", { class: "button", href: "/status", target: "_blank", rel: "noopener" }, "Status as JSON"),
        h("a", { class: "button", href: "/metrics", target: "_blank", rel: "noopener" }, "Metrics"),
        this.#drain,
      ),
      this.#notice.element,
      this.#tiles,
      h(
        "section",
        { class: "card graphs", "aria-label": "Over time" },
        h("h2", {}, "Over time"),
        ...this.#graphs.map((it) => it.element),
      ),
      this.#sessions.element,
      this.#queue.element,
      this.#workers.element,
      this.#refused,
    );
  }

  async follow() {
    this.#isShown = true;
    clearTimeout(this.#timer);
    await this.#goOn();
  }

  rest() {
    this.#isShown = false;
  }

  async #goOn() {
    if (!document.hidden) await this.#look();
    clearTimeout(this.#timer);
    this.#timer = window.setTimeout(() => this.#goOn(), this.#isShown ? LOOK_MS : ASIDE_MS);
  }

  async #look() {
    try {
      const [status, queue, { workers }] = await Promise.all([
        askJson("/status"),
        askJson("/api/queue"),
        askJson("/api/workers"),
      ]);
      this.#tell(status);
      this.#sessions.fill(status.sessions.map(sessionRow));
      this.#queue.fill(queue.tickets.map((/** @type {any} */ it) => this.#ticketRow(it)));
      this.#workers.fill(workers.map((/** @type {any} */ it) => this.#workerRow(it, workers.length)));
      this.#notice.say("");
    } catch (error) {
      this.#notice.say(/** @type {ApiError} */ (error).message);
    }
  }

  #askToDrain() {
    const { drain_s: s } = this.#app.facts;
    const drain = async () => {
      shown.close();
      await this.#do("/api/drain", "POST");
    };
    const shown = dialog(
      "Drain the server",
      h(
        "p",
        {},
        `From now on it takes no sessions, and those that wait for a slot end. Those that run are told, and have ${s} s to finish. Then the server ends, as after a SIGTERM.`,
      ),
      h("p", {}, "This cannot be undone: the server has to be started again, by you or by what watches it."),
      h(
        "div",
        { class: "row" },
        h("button", { type: "button", class: "danger", onclick: drain }, "Drain and end it"),
        h("button", { type: "button", autofocus: true, onclick: () => shown.close() }, "Cancel"),
      ),
    );
  }

  /** @param {any} status */
  #tell(status) {
    const { slots, sessions } = status;
    this.#drain.disabled = ["draining", "loading"].includes(status.readiness);
    const dropped = sessions.reduce(
      (/** @type {number} */ sum, /** @type {any} */ it) => sum + it.dropped_units,
      0,
    );
    const tokens = sessions.reduce((/** @type {number} */ sum, /** @type {any} */ it) => sum + it.kv_tokens, 0);
    const tiles = [
      ["Sessions", sessions.length],
      [
        "Free slots",
        slots ? slots.free : "–",
        slots
          ? `of ${slots.slots}${slots.condemned ? `, ${slots.condemned} condemned` : ""}`
          : "the model loads",
      ],
      ["Waiting", status.queue_length, `at most ${status.max_queue_size}`],
      ["Connections", status.connections],
      ["Dropped seconds", dropped, "of the sessions that run"],
      ["KV tokens", tokens.toLocaleString()],
      ["Recorded", size(status.recorder.file_bytes ?? 0), "since the start"],
      ["Up", duration(1000 * status.uptime_s), `version ${status.version}`],
    ];
    fill(
      this.#tiles,
      ...tiles.map(([name, value, note]) =>
        h("div", {}, h("dt", {}, name), h("dd", {}, String(value), note && h("small", {}, note))),
      ),
    );
    const amounts = [[sessions.length, slots?.slots], [status.queue_length], [dropped], [tokens]];
    amounts.forEach(([value, limit], i) => this.#graphs[i].add(value, limit));
    const denied = Object.entries(status.denied).filter(([, count]) => count);
    this.#refused.textContent = denied.length
      ? `Denied requests: ${denied.map(([reason, count]) => `${count} ${reason.replaceAll("_", " ")}`).join(", ")}.`
      : "";
  }

  /** @param {any} ticket */
  #ticketRow({ ticket_id: id, position, estimated_wait_s: s, waited_s: waited, mode, owner }) {
    const cancel = h(
      "button",
      {
        type: "button",
        class: "danger",
        "aria-label": `Cancel place ${position}`,
        onclick: () => this.#do(`/api/queue/${encodeURIComponent(id)}`, "DELETE"),
      },
      "Cancel",
    );
    return [String(position), mode, owner || "–", duration(1000 * waited), `${s} s`, cancel];
  }

  /** @param {any} worker @param {number} count */
  #workerRow(worker, count) {
    const drain = h(
      "button",
      {
        type: "button",
        class: "danger",
        disabled: count < 2 || worker.state === "draining",
        title:
          count < 2
            ? "There is no other worker for its sessions"
            : "Lease no more of its slots, and move its sessions",
        onclick: () => this.#do(`/api/workers/${worker.number}/drain`, "POST"),
      },
      "Drain",
    );
    return [
      worker.where,
      worker.state,
      `${worker.leased} of ${worker.slots}`,
      worker.age_s === null ? "–" : duration(1000 * worker.age_s),
      drain,
    ];
  }

  /** @param {string} path @param {string} method */
  async #do(path, method) {
    try {
      await ask(path, { method });
      await this.#look();
    } catch (error) {
      this.#notice.say(/** @type {ApiError} */ (error).message);
    }
  }
}

/** @param {any} session */
function sessionRow({
  session_id: id,
  mode,
  owner,
  state,
  connection,
  age_s: age,
  units,
  chunks,
  dropped_units: dropped,
  kv_tokens: tokens,
}) {
  const away = connection === "connected" ? "" : `, ${connection}`;
  const count = mode === "transcription" ? chunks : units;
  return [
    h("code", {}, id ?? "–"),
    mode,
    owner || "–",
    `${state.toLowerCase()}${away}`,
    duration(1000 * age),
    String(count),
    String(dropped),
    tokens.toLocaleString(),
  ];
}

/** A table that shows only its name where it has no rows. @param {string} name @param {string[]} columns */
function table(name, columns) {
  const body = h("tbody", {});
  const head = h(
    "tr",
    {},
    ...columns.map((column) => h("th", { scope: "col" }, column || spoken("Actions"))),
  );
  const none = h("p", { class: "soft small" }, "None now.");
  const shown = h("div", { class: "scroll" }, h("table", { class: "cards" }, h("thead", {}, head), body));
  const cells = (/** @type {(string | Node)[]} */ row) =>
    row.map((cell, i) => h("td", columns[i] ? { "data-name": columns[i] } : { class: "actions" }, cell));
  return {
    element: h("section", { class: "card", "aria-label": name }, h("h2", {}, name), none, shown),
    /** @param {(string | Node)[][]} rows */
    fill(rows) {
      none.hidden = rows.length > 0;
      shown.hidden = !rows.length;
      fill(body, ...rows.map((row) => h("tr", {}, ...cells(row))));
    },
  };
}
