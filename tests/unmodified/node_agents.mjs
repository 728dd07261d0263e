// The OpenAI Agents SDK of npm, its RealtimeSession over a WebSocket.
//
// Its schemas are strict: a frame that they do not have ends its process. Arguments: scene, base
// address, model, question (PCM16, 24 kHz).
import fs from 'node:fs';
import { OpenAIRealtimeWebSocket, RealtimeAgent, RealtimeSession, tool } from '@openai/agents/realtime';

const PIECE_BYTES = 960;
const PIECE_MS = 20;
const SECOND_BYTES = 48000;
const QUICKLY = 3;
const [scene, base, model, file] = process.argv.slice(2);
const question = fs.readFileSync(file);
const report = { events: {}, words: '', sound_s: 0, failures: [], interrupted_s: null };
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

const url = `${base.replace(/^http/, 'ws')}/realtime?model=${model}`;
const clock = tool({
  name: 'clock',
  description: 'The time.',
  parameters: { type: 'object', properties: {}, required: [], additionalProperties: true },
  strict: false,
  execute: () => "nine o'clock",
});
const agent = new RealtimeAgent({ name: 'assistant', instructions: 'Answer briefly.', tools: [clock] });
const transport = new OpenAIRealtimeWebSocket({ url, useInsecureApiKey: true });
const session = new RealtimeSession(agent, { transport, model, tracingDisabled: true });
let spokeAt = null;
session.on('error', (error) => report.failures.push(JSON.stringify(error)));
session.on('transport_event', (event) => {
  report.events[event.type] = (report.events[event.type] ?? 0) + 1;
  if (event.type === 'response.output_audio_transcript.delta') report.words += event.delta;
  if (event.type === 'input_audio_buffer.speech_started' && spokeAt !== null) {
    report.interrupted_s ??= (performance.now() - spokeAt) / 1000;
  }
});
session.on('audio', (event) => { report.sound_s += event.data.byteLength / SECOND_BYTES; });

async function say(sound, pace) {
  for (let at = 0; at < sound.length; at += PIECE_BYTES) {
    const piece = sound.subarray(at, at + PIECE_BYTES);
    session.sendAudio(piece.buffer.slice(piece.byteOffset, piece.byteOffset + piece.byteLength));
    await sleep(PIECE_MS / pace);
  }
}

await session.connect({ apiKey: 'none', url });
if (scene === 'interrupt') {
  for (let tenths = 0; tenths < 120 && report.sound_s === 0; tenths += 1) await say(Buffer.alloc(SECOND_BYTES / 10), 1);
  spokeAt = performance.now();
  await say(question.subarray(0, 2 * SECOND_BYTES), 1);
  await say(Buffer.alloc(SECOND_BYTES), 1);
} else {
  await say(Buffer.concat([question, Buffer.alloc(5 * SECOND_BYTES)]), QUICKLY);
  await sleep(2000);
}
session.close();
console.log(JSON.stringify(report));
process.exit(0);
