/* Numbers and values as text. */

/** A time of the session, such as `2:03.450`; `digits` after the point. */
export function clock(seconds, digits = 1) {
  const scale = 10 ** digits;
  const whole = Math.floor(Math.max(0, seconds) * scale + 1e-6);
  const minutes = Math.floor(whole / scale / 60);
  const rest = (whole - minutes * 60 * scale) / scale;
  return `${minutes}:${rest.toFixed(digits).padStart(digits ? digits + 3 : 2, "0")}`;
}

/** A length of time, such as `37 ms` or `1.25 s`. */
export function span(seconds) {
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(seconds < 0.00995 ? 1 : 0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  return clock(seconds, 0);
}

export function count(number) {
  return number.toLocaleString("en-US");
}

/** `1 unit`, `2 units`. */
export function many(number, one, more = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : more}`;
}

/** A value in a line of at most about `length` characters. */
export function brief(value, length = 240) {
  if (typeof value === "string")
    return value.length > length ? `${value.slice(0, length)}…` : value;
  if (value === null || typeof value !== "object") return String(value);
  const items = Array.isArray(value) ? value.map((item) => [null, item]) : Object.entries(value);
  let text = "";
  for (const [name, item] of items) {
    if (text.length > length) return `${text}, …`;
    const nested = item !== null && typeof item === "object";
    const shown = nested
      ? Array.isArray(item)
        ? `[${brief(item, 60)}]`
        : `{${brief(item, 80)}}`
      : brief(item, length);
    text += (text && ", ") + (name === null ? shown : `${name}: ${shown}`);
  }
  return text;
}

/** What of a record's fields stands in its row. */
export function summary(row) {
  const { frame, kept } = row.fields;
  const before = typeof kept === "string" ? `(${kept}) ` : "";
  if (typeof frame === "string")
    return before + (frame.length > 400 ? `${frame.slice(0, 400)}…` : frame);
  return before + brief(row.fields);
}
