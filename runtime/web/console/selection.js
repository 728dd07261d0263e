// Which recordings of the list are selected: two are compared, any number is deleted.

import { nameOf } from "./actions.js";
import { button, fill, h } from "./dom.js";

/**
 * @typedef {{compares: boolean, removes: boolean, remove: (row: Element) => Promise<string>, onFailure: (text: string) => void}} Actions
 *   `remove` gives why a recording was not removed; empty if it was
 */

export class Selection {
  /** @type {Element} */ #rows;
  /** @type {Actions} */ #actions;
  /** @type {Map<string, {name: string, box: any}>} by their ids; one that cannot be read has no name */ #selected = new Map();
  all = h("input", { type: "checkbox", "aria-label": "Select all that are shown", onchange: () => this.#selectAll() });
  element = h("p", { class: "row under", hidden: true, role: "status" });

  /** @param {Element} rows of the list @param {Actions} actions */
  constructor(rows, actions) {
    [this.#rows, this.#actions] = [rows, actions];
  }

  /** The box that selects a recording. @param {any} it */
  picker(it) {
    const name = nameOf(it);
    const box = h("input", {
      type: "checkbox",
      "aria-label": `Select the recording of ${name}`,
      onchange: () => {
        if (!box.checked) return this.drop(it.recording_id);
        this.#selected.set(it.recording_id, { name: it.state === "unreadable" ? "" : name, box });
        this.#tell();
      },
    });
    return box;
  }

  clear() {
    this.#selected.clear();
    this.#tell();
  }

  /** @param {string} id of a recording that is selected no more */
  drop(id) {
    this.#selected.delete(id);
    this.#tell();
  }

  #selectAll() {
    const isWanted = this.all.checked;
    for (const it of this.#rows.querySelectorAll("td.pick input")) if (/** @type {any} */ (it).checked !== isWanted) /** @type {any} */ (it).click();
  }

  #tell() {
    const [first, second, more] = [...this.#selected];
    const count = this.#selected.size;
    this.element.hidden = !count;
    if (!count) return void (this.all.checked = false);
    const isPair = this.#actions.compares && first[1].name && second?.[1].name && !more;
    const href = isPair && `#compare/${encodeURIComponent(first[0])}/${encodeURIComponent(second[0])}`;
    const compare = href && h("a", { class: "button", href }, "Compare");
    /** @type {any} */ const removal = this.#actions.removes && button(`Delete ${count}`, () => this.#remove(removal), { class: "danger" });
    const alone = this.#actions.compares ? "Select another one to compare." : "1 selected.";
    const told = isPair ? `${first[1].name} with ${second[1].name}` : count === 1 ? alone : `${count} selected.`;
    fill(this.element, ...[compare, removal, h("span", { class: "soft" }, told)].filter(Boolean));
  }

  /** The first click asks, the second one removes all that are selected. @param {any} button */
  async #remove(button) {
    const text = button.textContent;
    if (text.startsWith("Delete")) {
      button.textContent = `Really ${text.toLowerCase()}?`;
      return void button.addEventListener("blur", () => (button.textContent = text), { once: true });
    }
    button.disabled = true;
    let failure = "";
    for (const { box } of [...this.#selected.values()]) failure = (await this.#actions.remove(box.closest("tr"))) || failure;
    this.#tell();
    this.#actions.onFailure(failure);
  }
}
