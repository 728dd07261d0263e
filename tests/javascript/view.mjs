// What a session's page computes without a document: times, places, what is in view, what is short.
import assert from "node:assert/strict";
import { neighboursOf, readAddress, writeAddress } from "../../replay/view/page/address.js";
import { assemble, bytesOf, lastBefore, rowAt, rowBefore } from "../../replay/view/page/data.js";
import { brief, clock, many, span, summary } from "../../replay/view/page/format.js";
import { placeOfMark } from "../../replay/view/page/marks.js";
import { Scale } from "../../replay/view/page/scale.js";
import { stretched } from "../../replay/view/page/stretch.js";
import { sumsOf } from "../../replay/view/page/sums.js";
import { linesOf, matchesOf, passagesOf, textOf } from "../../replay/view/page/transcript.js";
import { deadlineOf, stagesOf, whyOf } from "../../replay/view/page/units.js";

function checkFormats() {
  assert.equal(clock(0), "0:00.0");
  assert.equal(clock(59.96, 1), "0:59.9");
  assert.equal(clock(123.4567, 3), "2:03.456");
  assert.equal(clock(600, 0), "10:00");
  assert.equal(clock(-1), "0:00.0");
  assert.equal(span(0.037), "37 ms");
  assert.equal(span(0.0042), "4.2 ms");
  assert.equal(span(1.25), "1.25 s");
  assert.equal(many(1, "unit"), "1 unit");
  assert.equal(many(1200, "unit"), "1,200 units");
  assert.equal(brief({ a: 1, b: [1, 2], c: { d: null } }), "a: 1, b: [1, 2], c: {d: null}");
  assert.ok(brief("x".repeat(10_000)).length < 300);
  assert.ok(brief(Array.from({ length: 10_000 }, (_, i) => i)).length < 400);
  assert.equal(summary({ fields: { frame: "{}" } }), "{}");
}

function checkScale() {
  const scale = new Scale(600);
  scale.width = 1000;
  assert.ok(scale.begin < 0 && scale.end > 600);
  scale.show(100, 10);
  assert.equal(scale.x(105), 500);
  assert.equal(scale.time(500), 105);
  const before = scale.time(250);
  scale.zoom(4, 250);
  assert.ok(Math.abs(scale.time(250) - before) < 1e-9, "what is under the pointer moved");
  for (let i = 0; i < 200; i++) scale.zoom(2, 250);
  assert.equal(scale.span, 0.25);
  for (let i = 0; i < 200; i++) scale.zoom(0.5, 900);
  assert.equal(scale.span, scale.whole);
  assert.equal(scale.begin, scale.first);
  scale.show(0, 5);
  scale.pan(-1e9);
  assert.equal(scale.begin, scale.first);
  scale.pan(1e9);
  assert.ok(Math.abs(scale.end - (scale.first + scale.whole)) < 1e-9);
  scale.reveal(300);
  assert.ok(scale.sees(300, 300));
  for (const wide of [0.25, 3, 60, 606]) {
    scale.show(10, wide);
    assert.ok(scale.ticks().times.length <= 14);
  }
}

function checkPlaces() {
  const rows = [2, 3, 7].map((seq) => ({ seq }));
  assert.equal(rowAt(rows, 3).seq, 3);
  assert.equal(rowAt(rows, 4).seq, 7);
  assert.equal(rowAt(rows, 8), null);
  assert.equal(rowBefore(rows, 6).seq, 3);
  assert.equal(rowBefore(rows, 0).seq, 2);
  assert.equal(rowBefore([], 0), undefined);
  assert.equal(
    lastBefore([1, 1, 2], 1, (each) => each),
    1,
  );
  assert.equal(
    lastBefore([], 1, (each) => each),
    -1,
  );
  assert.deepEqual(bytesOf("AAH/"), Uint8Array.from([0, 1, 255]));
  assert.throws(() => assemble([["rows", []]]), /cut off/);
}

function checkUnits() {
  const unit = {
    arrived: 1,
    started: 1.25,
    done: 1.75,
    finalized: 1.875,
    undone: null,
    costs: { prefill_us: 125_000 },
  };
  assert.equal(deadlineOf(unit), 2);
  const stages = [
    ["barrier wait", 0.25],
    ["prefill", 0.125],
    ["generate", 0.375],
    ["finalize", 0.125],
  ];
  assert.deepEqual(stagesOf(unit), stages);
  const started = { ...unit, arrived: null, done: null, finalized: null, costs: null };
  assert.deepEqual(stagesOf(started), []);
}

function checkWhy() {
  const unit = { outcome: "listen", forced: false, isFirst: false, margin: 3.25, isNearTie: false };
  assert.equal(whyOf(unit), "listening won by 3.25 logits");
  assert.match(whyOf({ ...unit, outcome: "speech", margin: 0.2, isNearTie: true }), /speaking.*nearly/);
  assert.match(whyOf({ ...unit, forced: true }), /had to listen/);
  assert.match(whyOf({ ...unit, isFirst: true }), /first seconds/);
  assert.equal(whyOf({ ...unit, margin: null }), null);
  assert.equal(whyOf({ ...unit, outcome: "failed" }), null);
}

const TALK = {
  user: [
    { begin: 1, end: 2 },
    { begin: 4, end: 5 },
  ],
  model: [{ begin: 2.5, end: 4.5 }],
  overlaps: [{ begin: 4, end: 4.5 }],
  turns: [
    { begin: 1, end: 2, delay: 0.5, answer: 2.5, is_silent: false },
    { begin: 4, end: 5, delay: null, answer: null, is_silent: true },
  ],
  barge_ins: [{ begin: 4, end: 4.5, is_yielded_to: true }],
};

function checkTranscript() {
  const said = [
    { voice: "model", begin: 2.5, end: 3.5, text: "one ", seq: 1 },
    { voice: "model", begin: 3.5, end: 4.5, text: "two", seq: 2 },
  ];
  const passages = passagesOf({ said, talk: TALK });
  assert.deepEqual(
    textOf(passages).split("\n"),
    [
      "[0:01.0] User: (speaks for 1.00 s)",
      "[0:02.5] Model: one two",
      "[0:04.0] User: (speaks for 1.00 s)",
    ],
  );
  assert.deepEqual(
    passages.map(({ notes }) => notes.length),
    [1, 1, 1],
  );
  assert.match(passages[1].notes[0], /breaks in.*silent after 500 ms/);
  assert.deepEqual(matchesOf(passages, "E T"), [{ index: 1, at: 2 }]);
  assert.deepEqual(matchesOf(passages, ""), []);
  const asked = { voice: "user", begin: 0, end: 1, text: "Why?", seq: 3 };
  assert.deepEqual(
    passagesOf({ said: [asked, ...said], talk: TALK }).map(({ voice }) => voice),
    ["user", "model"],
  );
}

function checkSums() {
  const unit = (started, outcome) => ({ started, outcome, done: started + 0.1 });
  const story = {
    talk: TALK,
    units: [unit(1, "listen"), unit(2, "speech"), unit(3, "speech")],
    turns: [],
    said: [{ voice: "model", begin: 2.5, text: "one two" }],
    drops: [],
    errors: [],
  };
  const sums = Object.fromEntries(sumsOf({ story }, { begin: 1.5, end: 4.25 }));
  assert.equal(sums["user speaks"], "750 ms");
  assert.equal(sums["model is heard"], "1.75 s");
  assert.equal(sums["both at once"], "250 ms");
  assert.equal(sums["response delay"], "500 ms (1 answer)");
  assert.equal(sums.units, "2: 2 speech");
  assert.equal(sums["model’s words"], "2");
  assert.equal(sums.errors, undefined);
}

function checkAddress() {
  const place = { t: 12.4, unit: 12, turn: null, seq: null, range: { begin: 3.5, end: 9 } };
  assert.equal(writeAddress(place), "#t=12.4&unit=12&range=3.5-9");
  assert.deepEqual(readAddress(writeAddress(place)), place);
  const nothing = { t: null, unit: null, turn: null, seq: null, range: null };
  for (const hash of ["", "#", "#t=-1&unit=x&range=9-3", "#t=1e9&range=1-", "#%&&&=="])
    assert.deepEqual(readAddress(hash), nothing);
  assert.equal(neighboursOf({ protocol: "file:", pathname: "/api/recordings/a/view" }), null);
  assert.equal(neighboursOf({ protocol: "https:", pathname: "/elsewhere/view" }), null);
  const found = neighboursOf({ protocol: "https:", pathname: "/api/recordings/a/view" });
  assert.equal(found.next, "/api/recordings/a/view?to=next");
  assert.equal(found.talk, "/api/recordings/a/view?to=talk");
}

/* A tone keeps its pitch, and lasts as long as it should. */
function checkStretching() {
  const rate = 16_000;
  const tone = Float32Array.from({ length: rate }, (_, i) => Math.sin((2 * Math.PI * 200 * i) / rate));
  for (const speed of [0.5, 1.5, 3]) {
    const made = stretched(tone, rate, speed);
    assert.equal(made.length, Math.round(rate / speed));
    let crossings = 0;
    for (let i = 1; i < made.length; i++) if (made[i - 1] < 0 && made[i] >= 0) crossings++;
    assert.ok(Math.abs(crossings * speed - 200) < 8, `${speed}: ${crossings * speed} Hz`);
    assert.ok(made.every((sample) => Math.abs(sample) <= 1.01));
  }
  assert.equal(stretched(tone, rate, 1), tone);
}

function checkMarks() {
  const marks = [
    { at: 2, kind: "mark", seq: 9, fields: { text: "in the log", by: "anna" } },
    { at: 3, kind: "mark", seq: 10, fields: { what: "lost", by: "recover" } },
  ];
  const mark = { number: 4, text: "later", by: "bert", written_ms: 0, is_removable: true };
  const later = { marks: [{ ...mark, at_ms: 1000, end_ms: 2500 }], damaged: 0 };
  const said = [{ voice: "model", begin: 1.5, end: 2.5, text: "hello", seq: 7 }];
  const lines = linesOf({ story: { marks, said, talk: null }, later });
  assert.deepEqual(textOf(lines).split("\n"), [
    "[0:01.0] Mark: later",
    "[0:01.5] Model: hello",
    "[0:02.0] Mark: in the log",
  ]);
  assert.deepEqual(lines[0].notes, ["to 0:02.5, bert, 1970-01-01 00:00 UTC, next to the log"]);
  assert.deepEqual(lines[2].notes, ["anna, in the log"]);
  assert.deepEqual([lines[0].number, lines[2].number], [4, null]);
  assert.deepEqual(placeOfMark(null, 1.2345), { at_ms: 1235, end_ms: 1235 });
  assert.deepEqual(placeOfMark({ begin: 1, end: 2.5 }, 9), { at_ms: 1000, end_ms: 2500 });
}

checkFormats();
checkWhy();
checkTranscript();
checkMarks();
checkSums();
checkAddress();
checkStretching();
checkScale();
checkPlaces();
checkUnits();
console.log("ok");
