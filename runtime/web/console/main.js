// The console: which page is shown, what is known of the server, and the key.

import { ApiError, askJson, key } from "./api.js";
import { fill, h } from "./dom.js";
import { chatPage } from "./chat.js";
import { comparePage } from "./compare.js";
import { recordingsPage } from "./recordings.js";
import { serverPage } from "./server.js";
import { talkPage } from "./talk.js";
import { transcribePage } from "./transcribe.js";

/** How often the server is asked how it stands, and how often while it does not answer. */
const LOOK_MS = 5000;
const LOST_LOOK_MS = 1000;

/**
 * @typedef {{element: HTMLElement, show?: () => void, hide?: () => void, learn?: (facts: any) => void}} Page
 * @typedef {{id: string, name: string, of?: string, make: (app: App) => Page, isOffered: (facts: any) => boolean}} Entry
 *   `of`: the page whose link leads to it
 */

/** @type {Entry[]} */
const PAGES = [
  { id: "talk", name: "Talk", make: talkPage, isOffered: () => true },
  { id: "recordings", name: "Recordings", make: recordingsPage, isOffered: (facts) => facts.recording.is_on },
  { id: "compare", name: "Compare", of: "recordings", make: comparePage, isOffered: (facts) => facts.recording.has_views },
  {
    id: "chat",
    name: "Chat",
    make: chatPage,
    isOffered: (facts) => !facts.models.length || facts.modes.includes("chat"),
  },
  {
    id: "transcribe",
    name: "Transcribe",
    make: transcribePage,
    isOffered: (facts) => !facts.models.length || facts.modes.includes("transcription"),
  },
  { id: "server", name: "Server", make: serverPage, isOffered: (facts) => facts.key.is_admin },
];

const at = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));

/** What the pages share. */
export class App {
  /** What the server says of itself (`/api/console`). @type {any} */ facts = null;
  /** @type {Map<string, Page>} */ #pages = new Map();
  #shown = "";
  #line = "";

  /** Begin: ask the server, and show the page of the address. */
  async begin() {
    at("key-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#useKey(at("key").value.trim());
    });
    at("ask-key").addEventListener("cancel", (/** @type {Event} */ event) => event.preventDefault());
    addEventListener("hashchange", () => this.#show());
    for (;;) {
      const isThere = await this.#look();
      await new Promise((resolve) => setTimeout(resolve, isThere ? LOOK_MS : LOST_LOOK_MS));
    }
  }

  /** Ask the server how it stands. @returns {Promise<boolean>} whether it answers */
  async #look() {
    if (document.hidden && this.facts) return true;
    if (at("ask-key").open) return true;
    try {
      this.#learn(await askJson("/api/console"));
      return true;
    } catch (error) {
      return this.#fail(/** @type {ApiError} */ (error));
    }
  }

  /** @param {any} facts */
  #learn(facts) {
    const isFirst = this.facts === null;
    this.facts = facts;
    at("banner").hidden = true;
    const tone =
      { ready: "good", full: "warn", draining: "warn", loading: "" }[/** @type {string} */ (facts.readiness)] ??
      "bad";
    this.#showState(facts.models[0] ?? "the model loads", facts.readiness, tone);
    this.#navigate();
    if (isFirst) this.#show();
    for (const page of this.#pages.values()) page.learn?.(facts);
  }

  /** @param {string} model @param {string} readiness @param {string} tone */
  #showState(model, readiness, tone) {
    const { name } = this.facts.key;
    const out =
      key.get() &&
      h(
        "button",
        { type: "button", class: "quiet", onclick: () => this.#leave() },
        name ? `${name}: sign out` : "Sign out",
      );
    const told = [
      h("span", { class: "model" }, model),
      h("span", { class: `pill ${tone}` }, readiness),
      out || "",
    ];
    const line = told.map((it) => (it ? it.textContent : "")).join("\n");
    if (line !== this.#line) fill(at("server"), ...told); // set again, a screen reader would read it again
    this.#line = line;
  }

  /** @param {ApiError} error */
  #fail(error) {
    if (error.status === 401) {
      this.askForKey(key.get() ? "The server does not know this key any more: it is kept for two hours." : "");
      return true;
    }
    at("banner").hidden = false;
    if (!error.status && this.facts) this.#showState(this.facts.models[0] ?? "", "no answer", "bad");
    at("banner").textContent = error.status
      ? error.message
      : "The server does not answer. This page tries again every second.";
    return error.status !== 0;
  }

  /** Ask the user for a key. @param {string} problem with the one before; empty for none */
  askForKey(problem) {
    at("key-problem").textContent = problem;
    at("key-problem").hidden = !problem;
    at("key").setAttribute("aria-invalid", String(Boolean(problem)));
    key.set("");
    if (!at("ask-key").open) at("ask-key").showModal();
    at("key").select();
  }

  /** @param {string} value */
  async #useKey(value) {
    if (!/^[\w-]{1,256}$/.test(value))
      return this.askForKey(value ? "A key has only letters, digits, - and _." : "Enter a key.");
    try {
      const headers = { Authorization: `Bearer ${value}` };
      key.set((await askJson("/api/console", { method: "POST", headers })).value);
      const facts = await askJson("/api/console");
      at("ask-key").close();
      at("key").value = "";
      this.#learn(facts);
    } catch (error) {
      if (/** @type {ApiError} */ (error).status === 401)
        return this.askForKey("The server does not know this key.");
      at("key-problem").textContent = /** @type {ApiError} */ (error).message;
      at("key-problem").hidden = false;
    }
  }

  /** Forget the key, and all that was shown with it. */
  #leave() {
    key.set("");
    location.reload();
  }

  #offered() {
    return PAGES.filter(({ isOffered }) => isOffered(this.facts));
  }

  #navigate() {
    const links = this.#offered()
      .filter(({ of }) => !of)
      .map(({ id, name }) => h("a", { href: `#${id}`, "aria-current": id === this.#shown ? "page" : null }, name));
    const now = [...at("nav").children].map((/** @type {Element} */ it) => it.textContent).join();
    if (now !== links.map((it) => it.textContent).join()) fill(at("nav"), ...links);
  }

  /** Show the page of the address; a page that was shown goes on behind it. */
  #show() {
    if (!this.facts) return;
    const [asked] = location.hash.slice(1).split("/");
    const offered = this.#offered();
    const entry = offered.find(({ id }) => id === asked) ?? offered[0];
    if (entry.id === this.#shown || (asked === "main" && this.#shown)) return; // to the page: the skip link
    this.#pages.get(this.#shown)?.hide?.();
    for (const page of this.#pages.values()) page.element.hidden = true;
    const page = this.#pages.get(entry.id) ?? this.#make(entry);
    page.element.hidden = false;
    this.#shown = entry.id;
    for (const link of at("nav").children) {
      if (link.getAttribute("href") === `#${entry.of ?? entry.id}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = `${entry.name} - Antiphon`;
    page.show?.();
  }

  /** @param {Entry} entry */
  #make({ id, make }) {
    const page = make(this);
    this.#pages.set(id, page);
    at("main").append(page.element);
    return page;
  }
}

new App().begin();
