// What a session's page computes without a document: times, places, what is in view, what is short.
import assert from "node:assert/strict";
import { assemble, bytesOf, lastBefore, rowAt, rowBefore } from "../../replay/view/page/data.js";
import { brief, clock, many, span, summary } from "../../replay/view/page/format.js";
import { Scale } from "../../replay/view/page/scale.js";
import { deadlineOf, stagesOf } from "../../replay/view/page/units.js";

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

checkFormats();
checkScale();
checkPlaces();
checkUnits();
console.log("ok");
