// Forms made of the server's own schema: each setting with its default and its bounds.

import { button, check, field, h, select } from "./dom.js";
import { SETTINGS, VALUES } from "./words.js";

/**
 * @typedef {{element: HTMLElement, values: () => Record<string, any>, check: () => boolean}} Form
 */

/** @param {any} schema @returns {string} its type, without null */
const typeOf = (schema) => [schema.type].flat().find((type) => type !== "null");

/**
 * A form for the settings of a schema; those with a single value are left out.
 * @param {Record<string, any>} schemas by their names @param {string[]} [without]
 * @returns {Form} `values` gives those that differ from their defaults
 */
export function settingsForm(schemas, without = []) {
  const rows = Object.entries(schemas)
    .filter(([name, schema]) => !without.includes(name) && isChoice(schema))
    .map(([name, schema]) => row(name, schema));
  const isSwitch = (/** @type {{input: any}} */ { input }) => Number(input.type === "checkbox");
  rows.sort((one, other) => isSwitch(one) - isSwitch(other)); // a switch has a line of its own
  const reset = button("Defaults", () => rows.forEach((it) => it.reset()), { class: "quiet" });
  const element = h(
    "div",
    { class: "grid" },
    ...rows.map((it) => it.element),
    h("div", { class: "row" }, reset),
  );
  return {
    element,
    values: () => Object.fromEntries(rows.flatMap((it) => (it.isDefault() ? [] : [[it.name, it.value()]]))),
    check: () => rows.every((it) => it.input.reportValidity()),
  };
}

/** @param {any} schema */
function isChoice(schema) {
  if (schema.default === undefined || "const" in schema) return false;
  const options = schema.enum?.filter((/** @type {any} */ it) => it !== null);
  return !options || options.length > 1;
}

/** @param {string} name @param {any} schema */
function row(name, schema) {
  const label = SETTINGS[name] ?? name;
  const note = `${name}. ${schema.description?.replaceAll("`", "") ?? ""}`.trim();
  const type = typeOf(schema);
  if (type === "boolean") {
    const made = check(label, { checked: schema.default, title: note, "aria-description": note });
    made.title = note;
    const value = () => made.input.checked;
    return {
      name,
      input: made.input,
      element: made,
      value,
      isDefault: () => value() === schema.default,
      reset: () => (made.input.checked = schema.default),
    };
  }
  const input = schema.enum
    ? select(
        schema.enum.filter((/** @type {any} */ it) => it !== null).map((/** @type {string} */ it) => [it, VALUES[it] ?? it]),
      )
    : number(schema, type);
  const reset = () => (input.value = String(schema.default));
  reset();
  input.setAttribute("aria-description", note);
  const value = () => (schema.enum ? input.value : Number(input.value));
  return {
    name,
    input,
    element: Object.assign(field(label, input, limits(schema, type)), { title: note }),
    value,
    isDefault: () => value() === schema.default,
    reset,
  };
}

/** The bounds of a number, to be read under its field. @param {any} schema @param {string} type */
function limits({ minimum, exclusiveMinimum, maximum, default: usual }, type) {
  if (type === "string") return "";
  return `${minimum ?? exclusiveMinimum} to ${maximum}, usually ${usual}`;
}

/** @param {any} schema @param {string} type */
function number(schema, type) {
  const { minimum: low = schema.exclusiveMinimum, maximum: high } = schema;
  const step = type === "integer" ? 1 : "any";
  return h("input", {
    type: "number",
    required: true,
    min: String(low ?? ""),
    max: String(high ?? ""),
    step: String(step),
    inputMode: type === "integer" ? "numeric" : "decimal",
  });
}
