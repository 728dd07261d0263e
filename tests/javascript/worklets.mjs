// The audio thread's processors, driven a block at a time: for each line of steps, a line of what they did.
import { createInterface } from "node:readline";

let processors = {};
Object.assign(globalThis, {
  registerProcessor: (name, made) => (processors[name] = made),
  AudioWorkletProcessor: class {
    port = {
      said: [],
      postMessage: (said, transfer) => this.port.said.push(structuredClone(said, { transfer })),
    };
  },
});

/** Load the processors into an audio thread of this rate. */
const loaded = new Map();
async function load(rate) {
  if (!loaded.has(rate)) {
    [processors, globalThis.sampleRate] = [{}, rate];
    await import(`../../runtime/web/worklets.js?${rate}`);
    loaded.set(rate, processors);
  }
  return loaded.get(rate);
}

async function drive({ rate = 24_000, steps, ...processorOptions }) {
  const { "antiphon-microphone": Microphone, "antiphon-speaker": Speaker } = await load(rate);
  const [microphone, speaker] = [new Microphone(), new Speaker({ processorOptions })];
  const heard = [];
  let next = 1;
  for (const [kind, count] of steps) {
    const made = () => Float32Array.from({ length: count }, () => next++ / 65_536);
    if (kind === "hear") {
      microphone.process([count ? [made()] : []]);
    } else if (kind === "play") {
      speaker.port.onmessage({ data: { type: "play", samples: made() } });
    } else if (kind === "flush") {
      speaker.port.onmessage({ data: { type: "flush", id: heard.length, fade: count } });
    } else {
      const out = new Float32Array(count);
      speaker.process([], [[out]]);
      heard.push(...out);
    }
  }
  const told = speaker.port.said.map(({ cut, ...said }) => (cut ? { ...said, cut: [...cut] } : said));
  return { heard, told, blocks: microphone.port.said.map((block) => [...block]) };
}

for await (const line of createInterface({ input: process.stdin }))
  console.log(JSON.stringify(await drive(JSON.parse(line))));
