// How a conversation is set up: prompt, voice, devices, and the model's settings.

import { encodeBase64 } from "../antiphon.js";
import { devices } from "../microphone.js";
import { askJson } from "./api.js";
import { field, fill, h, select } from "./dom.js";
import { settingsForm } from "./settings.js";
import { OwnVoice } from "./voice.js";

/** The longest system prompt that a server takes. */
const PROMPT_CHARS_MAX = 32_768;
/** Before a name of the server's library of voices. */
const LIBRARY = "library:";
/** Reference audio: 30 s in any format that is taken. */
const VOICE_BYTES_MAX = 12 * 1024 * 1024;

export class Setup {
  /** @type {import("./settings.js").Form | null} */ #form = null;
  #prompt = h("textarea", {
    rows: 3,
    maxLength: PROMPT_CHARS_MAX,
    placeholder: "You are a helpful assistant.",
    spellcheck: true,
  });
  #voice = select(
    [
      ["own", "The model’s own"],
      ["file", "A sound file…"],
      ["record", "Record your own…"],
    ],
    { onchange: () => this.#pickVoice() },
  );
  #file = h("input", {
    type: "file",
    accept: "audio/wav,audio/aiff,audio/flac,audio/ogg,audio/mpeg,.wav,.aiff,.flac,.ogg,.opus,.mp3",
    hidden: true,
    onchange: () => this.#takeFile(),
    oncancel: () => (this.#voice.value = this.#reference ? "file" : "own"),
  });
  #nearest = h("p", { class: "soft small", hidden: true });
  #microphone = select([["", "Default"]]);
  #speaker = select([["", "Default"]]);
  #recorder = new OwnVoice(
    () => this.microphoneId || undefined,
    () => this.lookForDevices(),
  );
  /** More that is chosen before a conversation. */ choices = h("div", { class: "choices" });
  #problem = h("p", { class: "problem", role: "alert", hidden: true });
  #advanced = h("div", {});
  /** @type {{name: string, base64: string} | null} */ #reference = null;

  constructor() {
    const advanced = h("details", {}, h("summary", {}, "Model settings"), this.#advanced);
    this.element = h(
      "section",
      { class: "card setup", "aria-label": "Set-up" },
      h("h2", {}, "Set-up"),
      h("p", { class: "soft small" }, "Takes effect when a conversation begins."),
      field("Prompt", this.#prompt),
      field("Voice", this.#voice),
      this.#nearest,
      this.#file,
      this.#recorder.element,
      this.#problem,
      h("div", { class: "pair" }, field("Microphone", this.#microphone), field("Loudspeaker", this.#speaker)),
      this.choices,
      advanced,
    );
    this.lookForDevices();
  }

  /** @param {any} facts of the server */
  learn({ settings, sliding_windows: windows, voices }) {
    if (this.#form || !windows.length) return;
    const duplex = { ...settings.duplex, sliding_window: { ...settings.duplex.sliding_window, enum: windows } };
    this.#form = settingsForm(duplex);
    fill(this.#advanced, this.#form.element);
    const some = voices.join(", ");
    this.#nearest.textContent = `This model copies no voice: of its own (${some}) it takes the nearest in pitch.`;
    this.#nearest.hidden = !some;
    this.#offerVoices();
  }

  /** Names are known once the browser's user has let the page use a device. */
  async lookForDevices() {
    for (const [kind, list] of /** @type {const} */ ([
      ["audioinput", this.#microphone],
      ["audiooutput", this.#speaker],
    ])) {
      const found = (await devices(kind).catch(() => [])).filter(({ id, name }) => id && name);
      const chosen = list.value;
      fill(
        list,
        h("option", { value: "" }, "Default"),
        ...found.map(({ id, name }) => h("option", { value: id }, name)),
      );
      list.value = found.some(({ id }) => id === chosen) ? chosen : "";
    }
  }

  /** What `Conversation` takes; null where a value is out of its bounds, and shown. */
  options() {
    if (this.#form && !this.#form.check()) return null;
    const config = this.#form?.values() ?? {};
    const isOwn = this.#voice.value === "record";
    const [, name] = this.#voice.value.split(LIBRARY);
    const base64 = isOwn ? this.#recorder.take() : this.#reference?.base64;
    if (isOwn && !base64) return null;
    return {
      instructions: this.#prompt.value,
      ...(Object.keys(config).length ? { config } : {}),
      ...(base64 ? { voice: { ref_audio_base64: base64 } } : {}),
      ...(name ? { voice: { ref_audio_path: name } } : {}),
    };
  }

  get microphoneId() {
    return this.#microphone.value;
  }

  get speakerId() {
    return this.#speaker.value;
  }

  /** Let go of microphone and loudspeaker, where a voice is recorded or played. */
  rest() {
    this.#recorder.rest();
  }

  /** @param {boolean} isRunning */
  lock(isRunning) {
    if (isRunning) this.rest();
    this.#recorder.element.inert = isRunning; // else the model would hear it played
    for (const input of this.element.querySelectorAll("input, select, textarea, button"))
      input.disabled = isRunning;
  }

  async #offerVoices() {
    const { default: first, voices = [] } = await askJson("/api/voices").catch(() => ({}));
    const offered = first ? [h("option", { value: "default" }, `The server’s: ${first}`)] : [];
    for (const { name } of voices)
      if (name !== first) offered.push(h("option", { value: LIBRARY + name }, name));
    this.#voice.options[0].after(...offered);
  }

  async #pickVoice() {
    this.#say("");
    this.#reference = null;
    this.rest();
    this.#recorder.element.hidden = this.#voice.value !== "record";
    if (this.#voice.value === "file") return this.#file.click();
    if (this.#voice.value !== "default") return;
    try {
      const { name, base64 } = await askJson("/api/default_ref_audio");
      if (this.#voice.value === "default") this.#reference = { name, base64 };
    } catch (error) {
      if (this.#voice.value !== "default") return; // another one was chosen meanwhile
      this.#voice.value = "own";
      this.#say(/** @type {Error} */ (error).message);
    }
  }

  async #takeFile() {
    const [file] = this.#file.files;
    if (!file || file.size > VOICE_BYTES_MAX) {
      this.#voice.value = "own";
      return this.#say(file ? `${file.name} is larger than 12 MB.` : "");
    }
    this.#reference = { name: file.name, base64: encodeBase64(await file.arrayBuffer()) };
    this.#voice.selectedOptions[0].textContent = `A sound file: ${file.name}`;
  }

  /** @param {string} text */
  #say(text) {
    this.#problem.textContent = text;
    this.#problem.hidden = !text;
  }
}
