// A conversation with devices that are only played: prints what it told, and what its devices were told.
import assert from "node:assert/strict";
import { Conversation, DeviceError } from "../../runtime/web/media.js";

const [, , url, scene] = process.argv;
const told = [];
const devices = [];
let clock = 0;
const now = performance.now.bind(performance);
performance.now = () => now() + clock;

const microphone = {
  level: 0,
  async open() {
    if (scene === "refused") throw new DeviceError("refused", "microphone: no");
    devices.push("microphone open");
  },
  close: () => devices.push("microphone closed"),
};
const speaker = {
  playedMs: 0,
  level: 0,
  async open() {
    devices.push("speaker open");
  },
  close: () => devices.push("speaker closed"),
  play: (samples) => devices.push(`play ${samples.length}`),
  async flush() {
    devices.push("flush");
    return { playedMs: 250, cutMs: 750, cut: new Float32Array(18_000) };
  },
};
const conversation = new Conversation(url, { microphone, speaker, instructions: "Be brief.", retries: 0 });
for (const name of [
  "state",
  "queue",
  "unit",
  "late",
  "answer",
  "caption",
  "turn",
  "interrupted",
  "error",
  "ended",
]) {
  conversation.on(name, (event) => told.push({ name, ...event }));
}
conversation.on("turn", () => {
  throw new Error("a listener that fails"); // it is logged, and keeps nothing from the others
});
console.error = () => {};
const until = async (condition) => {
  while (!condition()) await new Promise((resolve) => setTimeout(resolve, 5));
};
const say = (level = 0) => {
  for (let block = 0; block < 50; block++) microphone.onSamples?.(new Float32Array(320).fill(level));
};

if (scene === "refused") {
  await assert.rejects(conversation.start(), DeviceError);
} else if (scene === "stopped") {
  const starting = conversation.start();
  await until(() => conversation.state === "queued");
  await conversation.stop();
  await starting;
} else {
  await conversation.start();
  await assert.rejects(conversation.start());
  for (let unit = 1; unit <= 5; unit++) {
    say(unit === 2 ? 0.2 : 0);
    if (unit === 3) clock += 1500; // its answer comes late
    microphone.onSamples(new Float32Array(0));
    await until(() => told.filter(({ name, kind }) => name === "unit" && kind !== "dropped").length >= unit);
  }
  await conversation.stop("enough");
  await until(() => conversation.state === "ended");
}
const plain = told.map(({ metrics, error, latencyMs, delayMs, silentMs, ...rest }) => ({
  ...rest,
  ...(error ? { error: error.constructor.name } : {}),
  ...(delayMs === undefined ? {} : { isSoon: delayMs < 2500 }),
}));
console.log(JSON.stringify({ told: plain, devices }));
process.exit(0);
