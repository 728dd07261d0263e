// Whether a microphone hears the loudspeaker: for each file of a line (float32, 16 kHz, played and heard in
// turn), what the meter told. Messages come late by turns, and both clocks run differently.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { EchoMeter } from "../../runtime/web/echo.js";

const FRAME = 320;
const level = (samples) => Math.sqrt(samples.reduce((sum, it) => sum + it * it, 0) / samples.length);
let seed = 1;
const random = () => (seed = (seed * 16_807) % 2_147_483_647) / 2_147_483_647;

function measure(both) {
  const told = [];
  const meter = new EchoMeter((echo) => told.push(echo));
  const frames = both.length / FRAME / 2;
  const [played, heard] = [both.subarray(0, both.length / 2), both.subarray(both.length / 2)];
  const of = (samples, frame) => samples.subarray(frame * FRAME, (frame + 1) * FRAME);
  const events = [];
  for (let frame = 0; frame < frames; frame++) {
    const at = (frame + 1) * 20.002; // a hundred parts of a million apart
    events.push([at + 40 * random(), () => meter.hear(of(heard, frame), at + 40 * random())]);
  }
  for (let frame = 0; frame + 3 <= frames; frame += 3) {
    const levels = [0, 1, 2].map((i) => level(of(played, frame + i)));
    if (levels.every((it) => it === 0)) continue; // it reports nothing where it plays nothing
    const at = (frame + 3) * 20 + 30 * random();
    events.push([at, () => meter.play(levels, 7000 + frame, at)]);
  }
  events.sort(([one], [other]) => one - other);
  const began = performance.now();
  for (const [, take] of events) take();
  return { told, tookMs: performance.now() - began, frames };
}

for await (const path of createInterface({ input: process.stdin })) {
  const bytes = readFileSync(path);
  console.log(JSON.stringify(measure(new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4))));
}
