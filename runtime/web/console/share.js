// A redacted copy of a recording, to be downloaded: its user chooses what is taken out.

import { save } from "./api.js";
import { check, dialog, h, notice } from "./dom.js";

/** What can be taken out, by the names of `antiphon recordings redact --kind`. @type {[string, string][]} */
const KINDS = [
  ["audio", "Sound"],
  ["video,image", "Pictures"],
  ["text", "Words"],
  ["prompt", "The prompt"],
  ["voice", "The voice that was given"],
  ["name", "Names of sessions, owners and models"],
];

/** Offer copies of a recording. @param {string} id @param {string} [of] what it is called */
export function share(id, of = "this conversation") {
  const taken = KINDS.map(([kinds, name]) => check(name, { value: kinds, checked: true }));
  const told = notice("", "status");
  const buttons = [
    ["page", "Save the page", "redacted.html"],
    ["log", "Save the log", "redacted.session.zst"],
  ].map(([as, text, ending]) =>
    h("button", { type: "button", class: as === "page" ? "primary" : "", onclick: () => make(as, ending) }, text),
  );
  const make = async (/** @type {string} */ as, /** @type {string} */ ending) => {
    const kinds = taken.filter(({ input }) => input.checked).map(({ input }) => input.value);
    if (!kinds.length) return told.say("Nothing is ticked: download the recording itself instead.", "warn");
    const busy = (/** @type {boolean} */ isBusy) => buttons.forEach((it) => (it.disabled = isBusy));
    busy(true);
    told.say("The server makes the copy…", "");
    const path = `/api/recordings/${encodeURIComponent(id)}/redacted?as=${as}&kinds=${kinds.join(",")}`;
    try {
      await save(path, `${id}.${ending}`, (share) => told.say(`Downloading, ${Math.round(100 * share)} %`, ""));
      told.say("The copy is saved.", "good");
    } catch (error) {
      told.say(/** @type {Error} */ (error).message, "bad");
    }
    busy(false);
  };
  const shown = dialog(
    "Share a redacted copy",
    h("p", { class: "soft" }, `What is ticked is taken out. Times and lengths stay, and the recording of ${of} stays as it is.`),
    h("div", { class: "ticks", role: "group", "aria-label": "Take out" }, ...taken),
    told.element,
    h("div", { class: "row" }, ...buttons, h("button", { type: "button", onclick: () => shown.close() }, "Close")),
  );
}
