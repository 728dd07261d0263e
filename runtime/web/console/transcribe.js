// Transcribe: sound in, by microphone or from a file, and its text out while it arrives.

import { AntiphonError, connect } from "../antiphon.js";
import { DeviceError, Microphone } from "../microphone.js";
import { connection, sentence, url } from "./api.js";
import { Consent } from "./consent.js";
import { button, Countdown, fill, h, notice, select, spoken } from "./dom.js";

const RATE = 16_000;
/** Sound of a file goes out so fast: ten times as fast as it was spoken, in pieces of a second. */
const PIECE_MS = 100;
/** An hour: longer than a session may be. */
const FILE_S_MAX = 3600;
const IDLE = "Your browser will ask for the microphone. A file may have sound or video.";

/** @param {import("./main.js").App} app @returns {import("./main.js").Page} */
export function transcribePage(app) {
  const page = new TranscribePage(app);
  return { element: page.element, learn: () => page.learn() };
}

class TranscribePage {
  #app;
  /** @type {import("../antiphon.js").TranscriptionSession | null} */ #session = null;
  #microphone = new Microphone();
  #isRunning = false;
  #wasHeard = false;
  /** Utterances that are over, and whose text is still to come. */
  #unwritten = 0;
  #connecting = new AbortController();
  /** @type {any} */ #line = null;

  #models = select([], { "aria-label": "Model" });
  #listen = button("Start listening", () => (this.#isRunning ? this.#stop() : this.#dictate()), {
    class: "primary large",
  });
  #next = button("End utterance", () => this.#finish(), {
    disabled: true,
    title: "What is said next is a new utterance",
  });
  #picker = h("input", {
    type: "file",
    accept: "audio/*,video/*",
    hidden: true,
    onchange: () => this.#transcribeFile(),
  });
  #file = button("Open a file", () => this.#picker.click());
  #copy = button("Copy text", () => this.#copyText(), { class: "quiet" });
  #clear = button("Clear", () => this.#wipe(), { class: "quiet" });
  #lines = h("ol", { class: "transcript", "aria-label": "Text", tabIndex: 0 });
  #empty = h("p", { class: "nothing" }, "The text appears here while you speak.");
  #status = h("p", { class: "soft", role: "status" }, IDLE);
  #notice = notice("bad");
  #consent = new Consent("transcription");
  #countdown = new Countdown();

  /** @param {import("./main.js").App} app */
  constructor(app) {
    this.#app = app;
    this.element = h(
      "section",
      { class: "narrow", "aria-label": "Transcribe" },
      spoken("Transcribe", "h1"),
      h(
        "div",
        { class: "card stack" },
        h("div", { class: "row" }, this.#listen, this.#next, this.#file, this.#picker, this.#models),
        this.#status,
        this.#consent.element,
        this.#notice.element,
      ),
      h(
        "div",
        { class: "card stack" },
        this.#empty,
        h("div", { role: "log", "aria-label": "Text" }, this.#lines),
        h("div", { class: "row end" }, this.#copy, this.#clear),
      ),
    );
    this.learn();
    addEventListener("pagehide", () => this.#session?.close());
  }

  learn() {
    const { models } = this.#app.facts;
    this.#consent.learn(this.#app.facts);
    if (this.#models.options.length === models.length) return;
    fill(this.#models, ...models.map((/** @type {string} */ name) => h("option", { value: name }, name)));
    this.#models.hidden = models.length < 2;
  }

  // -- what is heard -------------------------------------------------------------------------------

  async #dictate() {
    if (!(await this.#begin())) return;
    try {
      this.#microphone.onSamples = (samples) => this.#say(samples);
      this.#microphone.onLost = (error) => this.#fail(error);
      await this.#microphone.open();
      this.#status.textContent = "Listening.";
    } catch (error) {
      this.#fail(/** @type {DeviceError} */ (error));
    }
  }

  async #transcribeFile() {
    const [file] = this.#picker.files;
    this.#picker.value = "";
    if (!file || !(await this.#begin())) return;
    try {
      const samples = await decode(file);
      for (let from = 0; from < samples.length && this.#isRunning; from += RATE) {
        this.#say(samples.slice(from, from + RATE));
        this.#status.textContent = `${file.name}: ${Math.round((100 * Math.min(samples.length, from + RATE)) / samples.length)} %`;
        await new Promise((resolve) => setTimeout(resolve, PIECE_MS));
      }
      if (this.#isRunning) this.#finish();
      this.#status.textContent = `${file.name}: sent.`;
      await this.#stop();
    } catch (error) {
      this.#fail(
        error instanceof AntiphonError ? error : new AntiphonError(`${file.name} cannot be read as sound`),
      );
    }
  }

  /** @returns {Promise<boolean>} whether there is a session */
  async #begin() {
    if (this.#isRunning) return false;
    [this.#isRunning, this.#unwritten] = [true, 0];
    this.#notice.say("");
    this.#status.textContent = "Connecting…";
    this.#listen.textContent = "Stop";
    this.#listen.classList.remove("primary");
    this.#file.disabled = true;
    this.#consent.lock(true);
    const { signal } = (this.#connecting = new AbortController());
    try {
      this.#session = await connect(url, {
        mode: "transcription",
        model: this.#models.value || this.#app.facts.models[0],
        ...this.#consent.options(),
        ...connection(),
        signal,
        onQueue: (place) => this.#countdown.queue(place, this.#status),
        onEvent: (event) => this.#write(event),
        onEnd: (error) => this.#end(error),
      });
      this.#countdown.stop();
      if (signal.aborted) this.#session.close();
      return !signal.aborted;
    } catch (error) {
      if (signal.aborted) return false;
      this.#fail(/** @type {Error} */ (error));
      return false;
    }
  }

  /** @param {Float32Array} samples */
  #say(samples) {
    if (!this.#session) return;
    this.#session.append(samples);
    this.#wasHeard = true;
    this.#next.disabled = false;
  }

  #finish() {
    if (!this.#wasHeard) return;
    this.#session?.finish();
    this.#unwritten += 1;
    this.#wasHeard = false;
    this.#next.disabled = true;
  }

  /** The last utterance is still to be written: its `done` ends the session. */
  async #stop() {
    this.#microphone.close();
    this.#finish();
    this.#isRunning = false;
    this.#connecting.abort();
    if (this.#session && this.#unwritten) {
      this.#listen.disabled = true;
      return void (this.#status.textContent = "Writing the rest…");
    }
    const session = this.#session;
    this.#end(null);
    await session?.close();
  }

  // -- what is written -----------------------------------------------------------------------------

  /** @param {import("../antiphon.js").TranscriptEvent} event */
  #write(event) {
    if (event.type === "error") return this.#notice.say(sentence(event.message));
    this.#empty.hidden = true;
    if (!this.#line) this.#lines.append((this.#line = h("li", { class: "open" })));
    const isDelta = event.type === "delta";
    if (isDelta) this.#line.append(event.text);
    else this.#line.textContent = event.text;
    this.#lines.scrollTop = this.#lines.scrollHeight;
    if (isDelta) return;
    this.#line.classList.remove("open");
    if (!event.text) this.#line.remove();
    this.#line = null;
    this.#unwritten -= 1;
    if (!this.#isRunning && !this.#unwritten) this.#session?.close();
  }

  /** @param {Error | null} error */
  #end(error) {
    this.#session = null;
    this.#isRunning = false;
    this.#countdown.stop();
    this.#microphone.close();
    this.#line = null;
    this.#listen.textContent = "Start listening";
    this.#listen.disabled = false;
    this.#listen.classList.add("primary");
    this.#file.disabled = false;
    this.#consent.lock(false);
    this.#next.disabled = true;
    this.#wasHeard = false;
    this.#status.textContent = IDLE;
    if (error) this.#notice.say(sentence(error.message));
  }

  /** @param {Error} error */
  #fail(error) {
    const session = this.#session;
    this.#end(error);
    session?.close();
  }

  async #copyText() {
    const text = [...this.#lines.children].map((/** @type {Element} */ line) => line.textContent).join("\n");
    try {
      await navigator.clipboard.writeText(text);
      this.#status.textContent = "Copied.";
    } catch {
      this.#notice.say("The browser does not let this page copy: select the text instead.");
    }
  }

  #wipe() {
    fill(this.#lines);
    if (this.#line) this.#lines.append(this.#line);
    this.#empty.hidden = Boolean(this.#line);
  }
}

/** @param {File} file @returns {Promise<Float32Array>} its first hour, 16 kHz mono */
async function decode(file) {
  const context = new OfflineAudioContext(1, 1, RATE);
  const sound = await context.decodeAudioData(await file.arrayBuffer());
  const mono = new OfflineAudioContext(
    1,
    Math.max(1, Math.ceil(Math.min(sound.duration, FILE_S_MAX) * RATE)),
    RATE,
  );
  const source = new AudioBufferSourceNode(mono, { buffer: sound });
  source.connect(mono.destination);
  source.start();
  return (await mono.startRendering()).getChannelData(0);
}
