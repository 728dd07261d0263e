// What can be done with a recording of the list: one menu a row.

import { button, h, menu, when } from "./dom.js";
import { replay } from "./replay.js";
import { share } from "./share.js";

/** How a recording is called: by its time. @param {any} it */
export const nameOf = (it) => (it.began_ms === null ? it.recording_id : when(it.began_ms));

/** A link to a recording's page, in a tab of its own; nothing where there is none. @param {any} it @param {boolean} hasViews @param {string} text @param {string} [place] in it */
export function pageLink(it, hasViews, text, place = "") {
  if (!hasViews || it.state === "unreadable") return null;
  const href = `/api/recordings/${encodeURIComponent(it.recording_id)}/view${place}`;
  return h("a", { href, target: "_blank", rel: "noopener" }, text);
}

/**
 * The menu of a recording.
 * @param {any} it @param {{hasViews: boolean, isAdmin: boolean}} may
 * @param {{save: (path: string, name: string) => void, remove: (button: HTMLButtonElement) => void}} on
 */
export function actionsOf(it, { hasViews, isAdmin }, { save, remove }) {
  const [id, name, isOpen] = [it.recording_id, nameOf(it), it.state === "open"];
  const isShown = hasViews && it.state !== "unreadable";
  const removal = button("Delete", () => remove(removal), { class: "danger", disabled: isOpen });
  return menu(`Actions for the recording of ${name}`, [
    pageLink(it, hasViews, "Open"),
    isShown && ["audio", "video"].includes(it.mode) && h("a", { href: `#talk/${encodeURIComponent(id)}` }, "Talk on"),
    isShown && button("Replay", () => replay(id, `the recording of ${name}`), { disabled: isOpen }),
    isShown && button("Share a redacted copy", () => share(id, name), { disabled: isOpen }),
    button("Download", () => save(`/api/recordings/${encodeURIComponent(id)}/log`, `${id}.session.zst`)),
    isAdmin && removal,
  ]);
}
