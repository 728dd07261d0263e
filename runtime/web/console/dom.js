// Elements: made with text, never with markup, so that what a server or a log says is only shown.

/** Between a menu and the edge of the window, in pixels. */
const GAP = 8;

/**
 * Make an element. Properties are set as they are; `class`, `for`, `role`, `aria-...` and `data-...`
 * are attributes; a function is a listener (`onclick`).
 * @param {string} tag @param {Record<string, any>} [properties] @param {...(Node | string | null | undefined | false)} children
 * @returns {any}
 */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (/^(class|for|role|list|form|href|type|aria-.*|data-.*)$/.test(name))
      element.setAttribute(name, value);
    else /** @type {any} */ (element)[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A button that sends no form. @param {string} text @param {() => unknown} [onclick] @param {Record<string, any>} [properties] */
export function button(text, onclick, properties = {}) {
  return h("button", { type: "button", onclick, ...properties }, text);
}

/** A field with its label. @param {string} label @param {HTMLElement} input @param {string} [note] */
export function field(label, input, note) {
  return h(
    "label",
    { class: "field" },
    h("span", {}, label),
    input,
    note && h("small", { class: "soft" }, note),
  );
}

/** A text for screen readers only. @param {string} text @param {string} [tag] */
export const spoken = (text, tag = "span") => h(tag, { class: "spoken" }, text);

/** A switch with its label. @param {string} label @param {Record<string, any>} properties */
export function check(label, properties) {
  const input = h("input", { type: "checkbox", ...properties });
  return Object.assign(h("label", { class: "check" }, input, h("span", {}, label)), { input });
}

/** A list of choices. @param {[string, string][]} options value and text @param {Record<string, any>} [properties] */
export function select(options, properties = {}) {
  return h("select", properties, ...options.map(([value, text]) => h("option", { value }, text)));
}

/** Put other children into an element. @param {Element} element @param {...(Node | string)} children */
export function fill(element, ...children) {
  element.replaceChildren(...children);
}

/** A message that stands until another takes its place. @param {"bad" | "warn" | "good" | ""} tone */
export function notice(tone = "", role = "alert") {
  const element = h("p", { class: `notice ${tone}`, role, hidden: true });
  const say = (/** @type {string | Node} */ text, now = tone) => {
    element.className = `notice ${now}`;
    element.replaceChildren(text);
    element.hidden = !text;
  };
  return { element, say };
}

/** Show a dialog, which is gone when it is closed. @param {string} title @param {...(Node | false)} children */
export function dialog(title, ...children) {
  const close = () => element.remove();
  const heading = h("h2", { id: "dialog-title" }, title);
  const element = h("dialog", { class: "stack", "aria-labelledby": heading.id, onclose: close }, heading, ...children);
  document.body.append(element);
  element.showModal();
  return element;
}

/**
 * A button that opens a menu; a choice, Esc or a click elsewhere closes it, but what is dangerous is asked again.
 * @param {string} label @param {any[]} choices buttons and links; what is empty is left out
 */
export function menu(label, choices) {
  const items = choices.filter(Boolean);
  for (const item of items) item.setAttribute("role", "menuitem");
  const list = h("div", { class: "menu", role: "menu", "aria-label": label, popover: "auto" }, ...items);
  const opener = button("⋯", () => list.togglePopover(), { class: "quiet", "aria-label": label, "aria-haspopup": "menu", "aria-expanded": "false" });
  list.addEventListener("toggle", (/** @type {any} */ { newState }) => {
    opener.setAttribute("aria-expanded", String(newState === "open"));
    if (newState !== "open") return;
    const { right, top, bottom } = opener.getBoundingClientRect();
    const isBelow = bottom + list.offsetHeight + GAP < innerHeight;
    list.style.left = `${Math.max(GAP, right - list.offsetWidth)}px`;
    list.style.top = `${isBelow ? bottom : top - list.offsetHeight}px`;
    items.find((it) => !it.disabled)?.focus();
  });
  list.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const usable = items.filter((it) => !it.disabled);
    usable.at((usable.indexOf(document.activeElement) + step) % usable.length)?.focus();
  });
  list.addEventListener("click", (/** @type {any} */ { target }) => target.closest(".danger") || list.hidePopover());
  return [opener, list];
}

/** The user's browser can tell a time of day, a duration and a size: this year's dates without the year. */
export const when = (/** @type {number} */ ms) => {
  const year = new Date(ms).getFullYear() === new Date().getFullYear() ? undefined : "numeric";
  return new Date(ms).toLocaleString(undefined, { year, month: "short", day: "numeric", hour: "numeric", minute: "2-digit", second: "2-digit" });
};

/** Counts seconds down. A screen reader reads the text when it begins: the changes of a timer are not read. */
export class Countdown {
  #ticking = 0;

  /**
   * In place of what was counted before.
   * @param {number} seconds @param {string} before @param {string} after @param {(text: Node) => void} show
   */
  start(seconds, before, after, show) {
    this.stop();
    const end = performance.now() + seconds * 1000;
    const timer = h("span", { role: "timer" });
    const tick = () => {
      const left = Math.max(0, Math.round((end - performance.now()) / 1000));
      timer.textContent = left ? `${left} s` : "a moment";
      if (!left) this.stop();
    };
    this.#ticking = window.setInterval(tick, 1000);
    tick();
    show(h("span", {}, before, timer, after));
  }

  /**
   * A place in the queue, and how long it may take.
   * @param {{position: number, queue_length: number, estimated_wait_s: number}} place @param {Element} shown
   */
  queue({ position, queue_length: length, estimated_wait_s: s }, shown) {
    this.start(s, `Place ${position} of ${length} in the queue, about `, ".", (text) => fill(shown, text));
  }

  stop() {
    clearInterval(this.#ticking);
  }
}

/** @param {number} ms */
export function duration(ms) {
  const s = Math.round(ms / 1000);
  const parts = [Math.floor(s / 3600), Math.floor(s / 60) % 60, s % 60];
  if (!parts[0]) parts.shift();
  return parts.map((part, i) => (i ? String(part).padStart(2, "0") : part)).join(":");
}

/** @param {number} bytes */
export function size(bytes) {
  const units = ["B", "kB", "MB", "GB"];
  let unit = 0;
  for (; bytes >= 1000 && unit < units.length - 1; unit++) bytes /= 1000;
  return `${bytes.toFixed(unit && bytes < 10 ? 1 : 0)} ${units[unit]}`;
}
