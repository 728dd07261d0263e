/* The list of records: all of them, of which only the rows in view exist in the document.
 *
 * The filter is words, all of which must stand somewhere in a record, and groups that are left out.
 */

import { clock, count, many, summary } from "./format.js";
import { GROUPS } from "./data.js";

const ROW_PX = 28;
const SPARE_ROWS = 6;

export class RecordList {
  /** `chosen` is called with a row that was clicked, or moved to by the keyboard. */
  constructor(page, rows, chosen) {
    this.rows = rows;
    this.shown = rows;
    this.chosen = chosen;
    this.selected = null;
    this.left_out = new Set();
    this.words = [];
    this.view = page.querySelector("#rows");
    this.space = page.querySelector("#rows-space");
    this.counter = page.querySelector("#row-count");
    this.input = page.querySelector("#filter");
    this.view.addEventListener("scroll", () => this.render(), { passive: true });
    this.view.addEventListener("click", (event) => this.clicked(event));
    this.view.addEventListener("keydown", (event) => this.pressed(event));
    this.input.addEventListener("input", () => this.filter());
    new ResizeObserver(() => this.render()).observe(this.view);
    this.makeGroups(page.querySelector("#groups"));
    this.filter();
  }

  makeGroups(place) {
    for (const group of Object.keys(GROUPS)) {
      const number = this.rows.filter((row) => row.group === group).length;
      if (!number) continue;
      const button = document.createElement("button");
      button.type = "button";
      button.className = `chip group-${group}`;
      button.textContent = `${group} ${count(number)}`;
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const isOut = this.left_out.has(group);
        if (isOut) this.left_out.delete(group);
        else this.left_out.add(group);
        button.setAttribute("aria-pressed", String(isOut));
        this.filter();
      });
      place.append(button);
    }
  }

  filter() {
    this.words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.shown = this.rows.filter((row) => this.matches(row));
    const all = this.rows.length;
    const some = this.shown.length;
    this.counter.textContent =
      some === all ? many(all, "record") : `${count(some)} of ${many(all, "record")}`;
    this.view.setAttribute("aria-rowcount", String(some));
    this.space.style.height = `${some * ROW_PX}px`;
    this.render();
  }

  matches(row) {
    if (this.left_out.has(row.group)) return false;
    if (!this.words.length) return true;
    row.search ??= `${row.seq} ${row.kind} ${row.type} ${JSON.stringify(row.fields)}`.toLowerCase();
    return this.words.every((word) => row.search.includes(word));
  }

  /** Put the rows in view into the document. */
  render() {
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW_PX) - SPARE_ROWS);
    const last = Math.min(
      this.shown.length,
      first + Math.ceil(this.view.clientHeight / ROW_PX) + 2 * SPARE_ROWS,
    );
    const made = [];
    for (let index = first; index < last; index++)
      made.push(this.element(this.shown[index], index));
    this.space.replaceChildren(...made);
  }

  element(row, index) {
    const line = document.createElement("div");
    line.className = "row";
    line.setAttribute("role", "row");
    line.setAttribute("aria-rowindex", String(index + 1));
    line.setAttribute("aria-selected", String(row === this.selected));
    line.id = `row-${row.seq}`;
    line.dataset.index = String(index);
    line.style.transform = `translateY(${index * ROW_PX}px)`;
    line.append(
      cell("time", clock(row.at, 3)),
      cell("seq", String(row.seq)),
      cell(`kind group-${row.group}`, row.kind),
      cell("type", row.type),
      cell("fields", summary(row)),
    );
    return line;
  }

  clicked(event) {
    const line = event.target.closest(".row");
    if (line) this.chosen(this.shown[Number(line.dataset.index)]);
  }

  pressed(event) {
    const steps = {
      ArrowDown: 1,
      ArrowUp: -1,
      PageDown: 12,
      PageUp: -12,
      Home: -Infinity,
      End: Infinity,
    };
    const step = steps[event.key];
    if (step === undefined || !this.shown.length) return;
    event.preventDefault();
    event.stopPropagation();
    const from = this.shown.indexOf(this.selected);
    const to = Math.min(this.shown.length - 1, Math.max(0, from + step));
    this.chosen(this.shown[to]);
  }

  /** Select a row, and bring it into view where the filter shows it. */
  select(row) {
    this.selected = row;
    const index = row === null ? -1 : this.shown.indexOf(row);
    if (index >= 0) {
      const top = index * ROW_PX;
      const bottom = top + ROW_PX - this.view.clientHeight;
      if (this.view.scrollTop > top || this.view.scrollTop < bottom) {
        this.view.scrollTop = top - this.view.clientHeight / 3;
      }
      this.view.setAttribute("aria-activedescendant", `row-${row.seq}`);
    } else {
      this.view.removeAttribute("aria-activedescendant");
    }
    this.render();
  }
}

function cell(name, text) {
  const made = document.createElement("span");
  made.className = `cell ${name}`;
  made.setAttribute("role", "gridcell");
  made.textContent = text;
  return made;
}
