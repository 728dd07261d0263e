// Talk: a spoken conversation with the model, by microphone, camera or screen, and loudspeaker.

import { Camera } from "../camera.js";
import { Conversation } from "../conversation.js";
import { Microphone } from "../microphone.js";
import { Speaker } from "../speaker.js";
import { connection, sentence, url } from "./api.js";
import { Consent } from "./consent.js";
import { button, check, Countdown, duration, field, fill, h, notice, select } from "./dom.js";
import { Past } from "./past.js";
import { replay } from "./replay.js";
import { Setup } from "./setup.js";
import { share } from "./share.js";
import { Captions, Lane, Levels, Measures, Meter } from "./stage.js";
import { ECHO, endOf, HINTS, RECORDED, SEEING, STATES, WORDS } from "./words.js";

const TICK_MS = 500;

/** @param {import("./main.js").App} app @returns {import("./main.js").Page} */
export function talkPage(app) {
  const page = new TalkPage(app);
  return { element: page.element, learn: (facts) => page.learn(facts), hide: () => page.rest() };
}

class TalkPage {
  #app;
  /** @type {Conversation | null} */ #conversation = null;
  #captions = new Captions();
  #lane = new Lane();
  #measures = new Measures();
  #levels = new Levels();
  #setup = new Setup();
  #consent = new Consent("conversation");
  #meter = new Meter(() => this.#setup.microphoneId);
  #notice = notice("warn");
  #advice = notice("warn");
  #state = h("h1", { class: "state", "aria-live": "polite" }, STATES.idle);
  #detail = h("p", { class: "soft detail", role: "status" }, "Your browser will ask for the microphone.");
  #links = h("p", { class: "links" });
  #hints = h("div", { class: "hints" });
  #past = new Past(() => {
    this.#setup.element.classList.toggle("fork", this.#past.mode !== null);
    this.#consent.require(this.#past.mode !== null);
    if (this.#past.mode) this.rest();
    if (this.#past.mode === "audio") this.#show.value = "";
    this.#lockPicture();
  });
  #preview = h("video", {
    class: "preview",
    muted: true,
    autoplay: true,
    playsInline: true,
    hidden: true,
    "aria-label": "What the model sees",
  });
  #began = 0;
  #ticking = 0;
  #countdown = new Countdown();

  #start = button("Start talking", () => this.#toggle(), { class: "primary large" });
  #mute = button("Mute", () => this.#setMuted(!this.#isMuted), { "aria-pressed": "false", title: "Mute (M)" });
  #interrupt = button("Interrupt", () => this.#conversation?.interrupt(), {
    title: "Make the model stop speaking (Esc)",
  });
  #push = button("Push to talk", () => this.#setPush(!this.#isPush), {
    "aria-pressed": "false",
    title: "Be heard only while you hold Space, or the button",
  });
  #hold = button("Hold to talk", undefined, { class: "primary large hold", hidden: true });
  #show = select(
    [
      ["", "No picture"],
      ["front", "Camera"],
      ["back", "Back camera"],
      ["screen", "Screen"],
    ],
    { onchange: () => this.#changePicture() },
  );
  #clock = check("A clock for the model, as a tool", { title: "The page tells the time when the model asks for it" });
  /** What is chosen before a conversation and may be changed in it: in the set-up, then among the controls. */
  #choices = [field("What the model sees", this.#show), this.#push];
  #volume = h("input", {
    type: "range",
    min: "0",
    max: "1",
    step: "0.05",
    value: "1",
    "aria-label": "Volume",
    oninput: () => this.#setVolume(),
  });
  #controls = h(
    "div",
    { class: "controls", role: "group", "aria-label": "Controls" },
    this.#mute,
    this.#interrupt,
    h("label", { class: "volume" }, h("span", { class: "soft" }, "Volume"), this.#volume),
  );
  #isMuted = false;
  #isPush = false;
  #isHeld = false;

  /** @param {import("./main.js").App} app */
  constructor(app) {
    this.#app = app;
    this.element = h(
      "div",
      { class: "talk" },
      h(
        "section",
        { class: "card stage", "aria-label": "Conversation" },
        h(
          "div",
          { class: "now" },
          this.#levels.element,
          h("div", { class: "says" }, this.#state, this.#detail),
          this.#preview,
        ),
        this.#past.element,
        this.#notice.element,
        this.#advice.element,
        h("div", { class: "row big" }, this.#start, this.#hold, this.#controls, this.#links),
        this.#meter.element,
        this.#consent.element,
        this.#captions.element,
        this.#hints,
        this.#lane.element,
        this.#measures.element,
      ),
      this.#setup.element,
    );
    this.#setup.choices.append(this.#clock);
    this.#listen();
    this.#settle("idle");
    this.learn(app.facts);
    const find = () => this.#isRunning || this.#past.find();
    addEventListener("hashchange", find);
    find();
  }

  /** @param {any} facts */
  learn(facts) {
    this.#setup.learn(facts);
    this.#consent.learn(facts);
    this.#captions.explain(WORDS[facts.transcriber ? "both" : "model"]);
    const hints = HINTS[facts.models[0]] ?? [];
    const seeing = this.#show.value ? SEEING[/** @type {keyof typeof SEEING} */ (facts.models[0])] : "";
    const shown = seeing ? [seeing, ...hints] : hints;
    if (this.#hints.dataset.said === shown.join()) return;
    this.#hints.dataset.said = shown.join();
    const phrases = shown.map((text) => h("li", {}, `“${text}”`));
    const chips = h("ul", { class: "chips", "aria-label": "What you can say" }, ...phrases);
    fill(
      this.#hints,
      ...(shown.length
        ? [h("p", { class: "soft small" }, "This model knows a few phrases. Say, for example:"), chips]
        : []),
    );
  }

  /** End the recording or playing of the user's own voice; a conversation goes on. */
  rest() {
    this.#setup.rest();
    this.#meter.rest();
  }

  // -- beginning and ending ------------------------------------------------------------------------

  get #isRunning() {
    return this.#conversation !== null;
  }

  async #toggle() {
    if (this.#conversation) return this.#conversation.stop();
    const setup = this.#past.options() ?? this.#setup.options();
    if (this.#past.refusal || !setup) return this.#notice.say(sentence(this.#past.refusal), "bad");
    if (!this.#app.facts.models.length) return this.#notice.say("The model is still being loaded.");
    if (!this.#past.mode && !this.#app.facts.modes.includes(this.#show.value ? "video" : "audio")) {
      return this.#notice.say(
        `The server does not offer ${this.#show.value ? "pictures" : "a conversation"} to you.`,
        "bad",
      );
    }
    this.#clear();
    this.#meter.rest();
    const deviceId = this.#setup.microphoneId || undefined;
    const microphone = new Microphone({ deviceId });
    const speaker = new Speaker({ deviceId: this.#setup.speakerId || undefined });
    const camera = this.#show.value ? new Camera({ source: this.#show.value }) : null;
    const tools = this.#clock.input.checked && !this.#past.mode ? { tools: { clock: this.#tellTime } } : {};
    const options = { ...setup, ...tools, ...this.#consent.options(), ...connection() };
    const conversation = new Conversation(url, { ...options, microphone, speaker, camera });
    this.#conversation = conversation;
    this.#hear(conversation);
    this.#setMuted(this.#isMuted);
    this.#setVolume();
    try {
      await conversation.start();
      this.#setup.lookForDevices();
    } catch {} // `ended` has said it
  }

  /** The tool that the page has. @param {object} _given @param {import("../antiphon.js").CallEvent} call */
  #tellTime = (_given, call) => {
    const time = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    this.#captions.tool(call, time);
    return time;
  };

  #clear() {
    this.#captions.clear();
    this.#lane.clear();
    this.#measures.clear();
    this.#notice.say("");
    this.#advice.say("");
    fill(this.#links);
  }

  /** @param {Conversation} conversation */
  #hear(conversation) {
    conversation.on("state", ({ state }) => this.#settle(state));
    conversation.on("queue", (place) => this.#countdown.queue(place, this.#detail));
    conversation.on("created", (created) => this.#created(created));
    conversation.on("caption", (caption) => this.#captions.model(caption));
    conversation.on("words", (words) => this.#captions.user(words));
    conversation.on("call", (call) => this.#lane.call(call));
    conversation.on("answer", ({ delayMs }) => this.#measures.delay(delayMs));
    conversation.on("interrupted", ({ silentMs }) => this.#measures.silent(silentMs));
    conversation.on("echo", (echo) => {
      this.#measures.echo(echo);
      if (echo.isHeard === this.#advice.element.hidden) this.#advice.say(echo.isHeard ? ECHO : "");
    });
    conversation.on("unit", (unit) => {
      this.#lane.add(unit);
      this.#measures.latency(unit.latencyMs);
      this.#measures.kv(Number(unit.metrics.kv_cache_length ?? 0), this.#app.facts.context_limit);
    });
    conversation.on("going_away", ({ secondsLeft }) =>
      this.#countdown.start(secondsLeft, "The server will shut down in ", ".", (text) => this.#notice.say(text, "warn")),
    );
    conversation.on("error", ({ code, message }) => {
      this.#notice.say(sentence(message), "bad");
      if (code === "camera_lost") this.#hidePicture();
    });
    conversation.on("connection", ({ type }) =>
      this.#notice.say(
        type === "reconnecting" ? "The connection is lost. The conversation goes on when it is back." : "",
      ),
    );
    conversation.on("ended", ({ reason, error }) => this.#ended(conversation, reason, error));
  }

  /** @param {import("../antiphon.js").Created} created */
  #created({ recording, recordingId, recordingNotice, tools }) {
    this.#countdown.stop();
    this.#began = Date.now();
    this.#ticking = window.setInterval(() => this.#measures.time(duration(Date.now() - this.#began)), TICK_MS);
    const noted = tools === "not_called" ? "This model calls no tools." : "";
    this.#detail.textContent = [RECORDED[recording ?? ""], recordingNotice, noted].filter(Boolean).join(" ");
    this.#links.dataset.recording = recording === "on" ? recordingId : "";
    this.#preview.srcObject = this.#conversation?.camera?.stream ?? null;
    this.#preview.hidden = !this.#preview.srcObject;
  }

  /** @param {Conversation} conversation @param {string} reason @param {Error | null} error */
  #ended(conversation, reason, error) {
    clearInterval(this.#ticking);
    this.#countdown.stop();
    this.#advice.say("");
    this.#captions.rest();
    this.#conversation = null;
    this.#detail.textContent = error ? "" : endOf(reason, null);
    this.#notice.say(error ? endOf(reason, error) : "", "bad");
    Object.assign(this.#preview, { hidden: true, srcObject: null });
    this.#settle("ended");
    this.#past.find();
    this.#start.focus();
    const id = conversation.created && this.#links.dataset.recording;
    if (!id || !this.#app.facts.recording.has_views) return;
    const [name, href] = [encodeURIComponent(id), `/api/recordings/${encodeURIComponent(id)}/view`];
    fill(
      this.#links,
      h("a", { class: "button", href, target: "_blank", rel: "noopener" }, "Open the recording"),
      button("Replay it", () => replay(id)),
      h("a", { class: "button", href: `#talk/${name}` }, "Talk on"),
      button("Share redacted", () => share(id)),
    );
  }

  /** @param {import("../conversation.js").ConversationState} state */
  #settle(state) {
    const isRunning = this.#isRunning;
    this.element.dataset.state = state;
    this.#state.textContent = STATES[state];
    if (["opening", "connecting", "queued"].includes(state)) this.#detail.textContent = "";
    this.#start.textContent = isRunning ? "Stop" : state === "ended" ? "Start again" : "Start talking";
    this.#start.classList.toggle("primary", !isRunning);
    this.#interrupt.disabled = state !== "speaking";
    this.#hold.hidden = !(isRunning && this.#isPush);
    if (isRunning) this.#interrupt.after(...this.#choices);
    else this.#setup.choices.append(...this.#choices);
    this.#setup.lock(isRunning);
    this.#consent.lock(isRunning);
    this.#lockPicture();
    if (this.#conversation && !["ended", "idle"].includes(state))
      this.#levels.follow(this.#conversation.microphone, this.#conversation.speaker);
    else this.#levels.rest();
  }

  // -- controls ------------------------------------------------------------------------------------

  #listen() {
    for (const [event, isHeld] of /** @type {const} */ ([
      ["pointerdown", true],
      ["pointerup", false],
      ["pointercancel", false],
      ["pointerleave", false],
    ])) {
      this.#hold.addEventListener(event, () => this.#setHeld(isHeld));
    }
    document.addEventListener("keydown", (event) => this.#key(event, true));
    document.addEventListener("keyup", (event) => this.#key(event, false));
    addEventListener("blur", () => this.#setHeld(false));
    // Else the session would wait for its client to come back, and hold its slot meanwhile.
    addEventListener("pagehide", () => this.#conversation?.stop("page closed"));
  }

  /** Space, M and Esc, unless they are meant for what has the focus. @param {KeyboardEvent} event @param {boolean} isDown */
  #key(event, isDown) {
    if (!this.#isRunning || this.element.hidden || event.ctrlKey || event.metaKey || event.altKey) return;
    const target = /** @type {Element} */ (event.target);
    if (target.closest("input, textarea, select, dialog")) return;
    if (event.key === "Escape" && isDown) this.#conversation?.interrupt();
    if (event.key.toLowerCase() === "m" && isDown && !event.repeat) this.#setMuted(!this.#isMuted);
    if (event.key === " " && this.#isPush) {
      event.preventDefault();
      this.#setHeld(isDown);
    }
  }

  /** @param {boolean} isMuted */
  #setMuted(isMuted) {
    this.#isMuted = isMuted;
    this.#apply();
  }

  /** @param {boolean} isPush */
  #setPush(isPush) {
    this.#isPush = isPush;
    this.#hold.hidden = !(this.#isRunning && isPush);
    this.#setHeld(false);
  }

  /** @param {boolean} isHeld */
  #setHeld(isHeld) {
    this.#isHeld = isHeld;
    this.#apply();
  }

  #apply() {
    if (this.#conversation)
      this.#conversation.microphone.muted = this.#isMuted || (this.#isPush && !this.#isHeld);
    this.#mute.setAttribute("aria-pressed", String(this.#isMuted));
    this.#push.setAttribute("aria-pressed", String(this.#isPush));
    this.#hold.classList.toggle("held", this.#isHeld);
    this.element.classList.toggle("muted", this.#isMuted || (this.#isPush && !this.#isHeld));
  }

  #setVolume() {
    if (this.#conversation) this.#conversation.speaker.volume = Number(this.#volume.value);
  }

  /** A session has pictures from its beginning or never: its mode says so. */
  #lockPicture() {
    this.#show.disabled = this.#past.mode === "audio" || (this.#isRunning && !this.#conversation?.camera);
    this.#show.title = this.#show.disabled
      ? "A conversation has pictures from its beginning: stop, and start again"
      : "What the model sees";
  }

  /** @param {Error} error */
  #lose(error) {
    this.#notice.say(sentence(error.message), "warn");
    this.#hidePicture();
  }

  #hidePicture() {
    this.#preview.hidden = true;
    this.#show.value = "";
  }

  async #changePicture() {
    this.learn(this.#app.facts);
    const conversation = this.#conversation;
    if (!conversation?.camera) return;
    conversation.camera.close();
    this.#preview.hidden = true;
    if (!this.#show.value) return;
    conversation.camera = new Camera({ source: this.#show.value, onLost: (error) => this.#lose(error) });
    try {
      await conversation.camera.open();
    } catch (error) {
      return this.#lose(/** @type {Error} */ (error));
    }
    this.#preview.srcObject = conversation.camera.stream;
    this.#preview.hidden = false;
  }
}
