// A microphone whose browser is only played: what is let go of, and what an error is called.
import assert from "node:assert/strict";
import { DeviceError, Microphone } from "../../runtime/web/media.js";

const streams = [];
let answer;
const stream = () => {
  const track = { kind: "audio", enabled: true, stopped: false, stop: () => (track.stopped = true) };
  Object.assign(track, { addEventListener: (_, ended) => (track.end = ended) });
  streams.push(track);
  return { getTracks: () => [track], getAudioTracks: () => [track] };
};
let rates = [];
let node;
class Context {
  audioWorklet = { addModule: async () => {} };
  constructor({ sampleRate }) {
    rates.push(sampleRate);
  }
  createMediaStreamSource() {
    if (rates.at(-1) && Context.isStrict) throw new DOMException("not at this rate", "NotSupportedError");
    return { connect: (to) => ((node = to), { connect: () => {} }) };
  }
  async resume() {}
  async close() {}
}
const mediaDevices = { getUserMedia: () => new Promise((resolve, reject) => (answer = { resolve, reject })) };
Object.defineProperty(globalThis, "navigator", { value: { mediaDevices }, configurable: true });
Object.assign(globalThis, { AudioContext: Context, AudioWorkletNode: class { port = {}; } });

const heard = [];
const microphone = new Microphone({ onSamples: (samples) => heard.push(samples[0]) });

// Closed while its user is asked: what comes then is let go of.
const early = microphone.open();
microphone.close();
answer.resolve(stream());
await early;
assert.deepEqual([streams[0].stopped, microphone.isOpen], [true, false]);

// Opened twice at once, the user is asked once.
const both = [microphone.open(), microphone.open()];
answer.resolve(stream());
await Promise.all(both);
assert.deepEqual([streams.length, microphone.isOpen], [2, true]);

// Muted, silence goes out, and the browser shows that nothing is heard.
node.port.onmessage({ data: new Float32Array(320).fill(0.5) });
microphone.muted = true;
node.port.onmessage({ data: new Float32Array(320).fill(0.5) });
assert.deepEqual([heard, streams[1].enabled], [[0.5, 0], false]);
assert.ok(microphone.level > 0.3 && microphone.level < 0.5);

// Another one is taken; a device that is taken away is told.
const chosen = microphone.choose("other");
answer.resolve(stream());
await chosen;
assert.deepEqual([streams[1].stopped, streams[2].stopped, streams[2].enabled], [true, false, false]);
let lost = null;
microphone.onLost = (error) => (lost = error);
streams[2].end();
assert.ok(lost instanceof DeviceError && lost.reason === "missing" && !microphone.isOpen);

// A browser that takes no device at 16 kHz gets its own rate.
[Context.isStrict, rates] = [true, []];
const other = microphone.open();
answer.resolve(stream());
await other;
assert.deepEqual(rates, [16_000, undefined]);
microphone.close();

// Errors say what the user can do.
for (const [name, reason] of [["NotAllowedError", "refused"], ["NotFoundError", "missing"], ["NotReadableError", "busy"]]) {
  const opening = microphone.open();
  answer.reject(new DOMException("no", name));
  await assert.rejects(opening, (error) => error instanceof DeviceError && error.reason === reason);
}
Object.defineProperty(globalThis, "navigator", { value: {}, configurable: true });
globalThis.isSecureContext = false;
await assert.rejects(microphone.open(), (error) => error.reason === "insecure");
console.log("ok");
