/* Places of the session in the page's address: `#t=12.4&unit=12&range=3.5-9`. */

/** Read an address; what is not a number is left out. */
export function readAddress(hash) {
  const told = new URLSearchParams(hash.replace(/^#/, ""));
  const number = (name) => {
    const text = told.get(name);
    return text !== null && /^\d{1,7}(\.\d{1,6})?$/.test(text) ? Number(text) : null;
  };
  const [, begin, end] = /^(\d{1,7}(?:\.\d{1,6})?)-(\d{1,7}(?:\.\d{1,6})?)$/.exec(told.get("range") ?? "") ?? [];
  const range = begin !== undefined && Number(end) > Number(begin);
  return {
    t: number("t"),
    unit: number("unit"),
    turn: number("turn"),
    seq: number("seq"),
    range: range ? { begin: Number(begin), end: Number(end) } : null,
  };
}

/** Write one; null is left out. */
export function writeAddress({ t = null, unit = null, turn = null, seq = null, range = null }) {
  const round = (time) => String(Math.round(time * 1000) / 1000);
  const told = [
    ["t", t === null ? null : round(t)],
    ["unit", unit],
    ["turn", turn],
    ["seq", seq],
    ["range", range === null ? null : `${round(range.begin)}-${round(range.end)}`],
  ];
  const shown = told.filter(([, value]) => value !== null);
  return shown.length ? `#${shown.map(([name, value]) => `${name}=${value}`).join("&")}` : "#";
}

const SERVED = /^\/api\/(recordings|sessions)\/[^/]+\/view$/;

/** The addresses that lead on from here, where a server shows this session; else null. */
export function neighboursOf({ protocol, pathname }) {
  if (!/^https?:$/.test(protocol) || !SERVED.test(pathname)) return null;
  const [all, previous, next, talk] = ["list", "previous", "next", "talk"].map((to) => `${pathname}?to=${to}`);
  return { all, previous, next, talk };
}
