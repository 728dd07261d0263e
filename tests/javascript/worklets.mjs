// The audio thread's processors, driven a block at a time: prints what they did with the given steps.
const processors = {};
Object.assign(globalThis, {
  sampleRate: 24_000,
  registerProcessor: (name, made) => (processors[name] = made),
  AudioWorkletProcessor: class {
    port = { said: [], postMessage: (said) => this.port.said.push(structuredClone(said)) };
  },
});
await import("../../runtime/web/worklets.js");

const { capacity, most, cushion, steps } = JSON.parse(process.argv[2]);
const speaker = new processors["antiphon-speaker"]({ processorOptions: { capacity, most, cushion } });
const heard = [];
let next = 1;
for (const [kind, count] of steps) {
  if (kind === "play") {
    const samples = Float32Array.from({ length: count }, () => next++ / 65_536);
    speaker.port.onmessage({ data: { type: "play", samples } });
  } else if (kind === "flush") {
    speaker.port.onmessage({ data: { type: "flush", id: heard.length, fade: count } });
  } else {
    const out = new Float32Array(count);
    speaker.process([], [[out]]);
    heard.push(...out);
  }
}
const told = speaker.port.said.map(({ cut, ...said }) => (cut ? { ...said, cut: [...cut] } : said));
console.log(JSON.stringify({ heard, told }));
