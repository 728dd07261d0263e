// A recording run again by the server, without the model: whether it comes out as it was recorded.

import { askJson } from "./api.js";
import { button, dialog, h, notice } from "./dom.js";

/** @type {Record<string, "good" | "bad" | "warn">} */
const TONES = { identical: "good", diverged: "bad", damaged: "bad", not_comparable: "warn" };

/** Replay a recording, and say what it finds. @param {string} id @param {string} [of] the name to show */
export async function replay(id, of = "this conversation") {
  const told = notice("", "status");
  const lines = h("div", { class: "stack" });
  const shown = dialog(
    "Replay",
    h("p", { class: "soft" }, `The input of ${of} goes through the server again, without the model. The output must be as recorded.`),
    told.element,
    lines,
    h("div", { class: "row" }, button("Close", () => shown.close())),
  );
  told.say("The server replays it…");
  try {
    const found = await askJson(`/api/recordings/${encodeURIComponent(id)}/replay`);
    const [verdict, ...rest] = found.lines; // as `antiphon replay` prints them
    told.say(`Replay: ${verdict}`, TONES[found.result]);
    lines.append(...rest.map((/** @type {string} */ line) => h("p", { class: "small" }, line)));
  } catch (error) {
    told.say(/** @type {Error} */ (error).message, "bad");
  }
}
