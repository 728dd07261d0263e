// Chat: a conversation in turns, typed, with files, answered in text and speech.

import { AntiphonError, connect, encodeBase64, SessionClosedError } from "../antiphon.js";
import { Speaker } from "../speaker.js";
import { askJson, connection, sentence, url } from "./api.js";
import { Consent } from "./consent.js";
import { button, check, Countdown, field, fill, h, notice, select, spoken } from "./dom.js";
import { settingsForm } from "./settings.js";

/** A message of chat may have 96 MiB, and base64 takes a third more than its bytes. */
const FILES_BYTES_MAX = 60 * 1024 * 1024;
/** A page that is scrolled so near to its end is at its end. */
const END_PX = 40;
const KINDS = /** @type {const} */ (["image", "audio", "video"]);

/** @param {import("./main.js").App} app @returns {import("./main.js").Page} */
export function chatPage(app) {
  const page = new ChatPage();
  page.learn(app.facts);
  addEventListener("pagehide", () => page.leave());
  return { element: page.element, learn: (facts) => page.learn(facts), show: () => page.focus() };
}

class ChatPage {
  /** @type {import("../antiphon.js").Message[]} */ #history = [];
  /** @type {import("../antiphon.js").ChatSession | null} */ #session = null;
  /** @type {File[]} */ #files = [];
  #speaker = new Speaker({
    onPlayed: () => (this.#silence.hidden = this.#speaker.queuedMs === 0),
    onIdle: () => (this.#silence.hidden = true),
  });
  #silence = button("Stop the sound", () => this.#speaker.flush(), { hidden: true });
  #isBusy = false;
  #isStopped = false;
  /** @type {import("./settings.js").Form | null} */ #form = null;

  #messages = h("div", { class: "messages", role: "log", "aria-live": "polite", "aria-label": "Conversation" });
  #empty = h(
    "p",
    { class: "nothing" },
    "Ask something. The model sees the whole conversation with each question, and forgets it afterwards.",
  );
  #text = h("textarea", {
    rows: 2,
    placeholder: "Your message",
    "aria-label": "Your message",
    onkeydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
  });
  #picker = h("input", {
    type: "file",
    multiple: true,
    hidden: true,
    accept: "image/jpeg,image/png,image/webp,audio/*,video/mp4,video/quicktime,video/webm,video/x-matroska",
    onchange: () => this.#attach(),
  });
  #attached = h("ul", { class: "attached", "aria-label": "Attached files" });
  #send = h("button", { type: "submit", class: "primary" }, "Send");
  #speak = check("Speak the answer", {});
  #voice = select([["", "The model’s own"]]);
  #prompt = h("textarea", { rows: 2, placeholder: "You are a helpful assistant." });
  #advanced = h("div", {});
  #status = h("p", { class: "soft small", role: "status" });
  #consent = new Consent("chat", () => this.#hangUp());
  #notice = notice("bad");
  #countdown = new Countdown();

  constructor() {
    const form = h(
      "form",
      {
        class: "card composer",
        onsubmit: (/** @type {Event} */ event) => (
          event.preventDefault(),
          this.#isBusy ? this.#stop() : this.#ask()
        ),
      },
      this.#text,
      this.#attached,
      this.#picker,
      h(
        "div",
        { class: "row" },
        this.#send,
        button("Attach", () => this.#picker.click()),
        this.#speak,
        this.#silence,
        button("New chat", () => this.#restart(), { class: "quiet" }),
        this.#status,
      ),
      h(
        "details",
        {},
        h("summary", {}, "Prompt, voice and settings"),
        h("div", { class: "pair" }, field("Prompt", this.#prompt), field("Voice of the answer", this.#voice)),
        this.#advanced,
      ),
      this.#consent.element,
    );
    this.element = h(
      "section",
      { class: "narrow", "aria-label": "Chat" },
      spoken("Chat", "h1"),
      this.#empty,
      this.#messages,
      this.#notice.element,
      form,
    );
  }

  /** @param {any} facts */
  learn(facts) {
    this.#speak.hidden = facts.speech === "off";
    this.#consent.learn(facts);
    if (this.#form || !facts.models.length) return;
    this.#form = settingsForm(facts.settings.chat);
    fill(this.#advanced, this.#form.element);
    this.#offerVoices();
  }

  /** The page goes: what waits for it is over. */
  leave() {
    this.#session?.close().catch(() => {});
  }

  /** The next question begins another session, which may be recorded where this one is not. */
  #hangUp() {
    this.leave();
    this.#session = null;
  }

  focus() {
    this.#text.focus();
  }

  async #offerVoices() {
    const { voices = [] } = await askJson("/api/voices").catch(() => ({}));
    this.#voice.append(
      ...voices.map((/** @type {{name: string}} */ { name }) => h("option", { value: name }, name)),
    );
  }

  /** Enter sends, and Shift+Enter begins a line. @param {KeyboardEvent} event */
  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.#isBusy) this.#ask();
  }

  #attach() {
    const chosen = [...this.#picker.files].filter((file) => KINDS.some((kind) => file.type.startsWith(kind)));
    const all = [...this.#files, ...chosen];
    const bytes = all.reduce((sum, file) => sum + file.size, 0);
    this.#picker.value = "";
    if (bytes > FILES_BYTES_MAX) return this.#notice.say("Together the files are larger than 60 MB.");
    this.#files = all;
    this.#showFiles();
  }

  #showFiles() {
    const removal = (/** @type {File} */ file) => {
      const remove = () => ((this.#files = this.#files.filter((it) => it !== file)), this.#showFiles());
      return button(`${file.name} ×`, remove, { title: "Remove", "aria-label": `Remove ${file.name}` });
    };
    fill(this.#attached, ...this.#files.map((file) => h("li", {}, removal(file))));
  }

  // -- a turn --------------------------------------------------------------------------------------

  async #ask() {
    const words = this.#text.value.trim();
    if ((!words && !this.#files.length) || (this.#form && !this.#form.check())) return;
    const files = this.#files;
    this.#begin();
    this.#show("user", words, files);
    const body = this.#show("model", "");
    const question = { role: /** @type {const} */ ("user"), content: await contentOf(words, files) };
    let answer = "";
    try {
      if (this.#speak.input.checked) await this.#speaker.open();
      this.#session ??= await this.#connect();
      if (this.#isStopped) throw new AntiphonError("stopped");
      const pieces = await this.#put([...this.#system(), ...this.#history, question]);
      for await (const piece of pieces) {
        if (piece.type !== "delta") continue;
        this.#tell("");
        answer += piece.text;
        this.#follow(() => (body.textContent = answer));
        if (piece.audio.length) this.#speaker.play(piece.audio);
      }
      this.#history.push(question, { role: "assistant", content: answer });
    } catch (error) {
      this.#fail(/** @type {Error} */ (error), answer, body);
    }
    this.#finish();
  }

  #connect() {
    const onQueue = (/** @type {import("../antiphon.js").QueuePlace} */ place) =>
      this.#countdown.queue(place, this.#status);
    return connect(url, { mode: "chat", ...this.#consent.options(), ...connection(), onQueue });
  }

  /**
   * Ask. A server ends a chat in which nothing was asked for a while: then ask in another one.
   * @param {import("../antiphon.js").Message[]} messages
   */
  async #put(messages) {
    try {
      return await /** @type {import("../antiphon.js").ChatSession} */ (this.#session).ask(
        messages,
        this.#how(),
      );
    } catch (error) {
      if (!(error instanceof SessionClosedError)) throw error;
      this.#session = await this.#connect();
      return this.#session.ask(messages, this.#how());
    }
  }

  #system() {
    const content = this.#prompt.value.trim();
    return content ? [{ role: /** @type {const} */ ("system"), content }] : [];
  }

  #how() {
    const generation = this.#form?.values() ?? {};
    const voice = this.#voice.value ? { ref_audio_path: this.#voice.value } : {};
    return { generation, speech: this.#speak.input.checked && !this.#speak.hidden ? voice : false };
  }

  #begin() {
    this.#speaker.flush();
    [this.#isBusy, this.#isStopped, this.#files] = [true, false, []];
    this.#text.value = "";
    this.#showFiles();
    this.#notice.say("");
    this.#send.textContent = "Stop";
    this.#consent.lock(true);
    this.#tell("Thinking…");
  }

  #finish() {
    this.#isBusy = false;
    this.#send.textContent = "Send";
    this.#consent.lock(false);
    this.#tell("");
    this.focus();
  }

  /** @param {Error} error @param {string} answer @param {HTMLElement} body */
  #fail(error, answer, body) {
    this.#hangUp();
    if (!answer) body.textContent = this.#isStopped ? "Stopped." : "No answer.";
    if (!this.#isStopped) this.#notice.say(sentence(error.message));
  }

  /** Ending the session is what stops an answer; the next question begins another. */
  #stop() {
    this.#isStopped = true;
    this.#speaker.flush();
    this.#session?.close().catch(() => {});
  }

  #restart() {
    this.#stop();
    [this.#session, this.#history] = [null, []];
    fill(this.#messages);
    this.#empty.hidden = false;
    this.#notice.say("");
    this.focus();
  }

  /** @param {"user" | "model"} who @param {string} words @param {File[]} [files] */
  #show(who, words, files = []) {
    this.#empty.hidden = true;
    const body = h("div", { class: "body" }, words, ...files.map(shown));
    const message = h(
      "div",
      { class: `message ${who}` },
      h("span", { class: "who" }, who === "user" ? "You" : "Model"),
      body,
    );
    this.#messages.append(message);
    message.scrollIntoView({ block: "nearest" });
    return body;
  }

  /** Show more of an answer, and its end if that was in view. @param {() => void} change */
  #follow(change) {
    const page = document.documentElement;
    const isAtEnd = page.scrollTop + page.clientHeight > page.scrollHeight - END_PX;
    change();
    if (isAtEnd) page.scrollTop = page.scrollHeight;
  }

  /** @param {string} text */
  #tell(text) {
    this.#countdown.stop();
    this.#status.textContent = text;
  }
}

/** @param {File} file */
function shown(file) {
  if (!file.type.startsWith("image/")) return h("div", { class: "soft small" }, file.name);
  const address = URL.createObjectURL(file);
  return h("img", { src: address, alt: file.name, onload: () => URL.revokeObjectURL(address) });
}

/** @param {string} words @param {File[]} files */
async function contentOf(words, files) {
  if (!files.length) return words;
  const parts = await Promise.all(
    files.map(async (file) => ({
      type: file.type.split("/")[0],
      data: encodeBase64(await file.arrayBuffer()),
    })),
  );
  return [...parts, ...(words ? [{ type: "text", text: words }] : [])];
}
