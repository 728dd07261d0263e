// The `openai` package of npm, its Realtime client over `ws` and over a browser's WebSocket.
//
// It speaks TLS only. Arguments: scene, base address, model, question (PCM16, 24 kHz).
import fs from 'node:fs';
import OpenAI from 'openai';
import { OpenAIRealtimeWS } from 'openai/realtime/ws';
import { OpenAIRealtimeWebSocket } from 'openai/realtime/websocket';
import WebSocket from 'ws';

const PIECE_BYTES = 960;
const PIECE_MS = 20;
const SECOND_BYTES = 48000;
const QUICKLY = 3;
const [scene, baseURL, model, file] = process.argv.slice(2);
const question = fs.readFileSync(file);
const report = { events: {}, words: '', sound_s: 0, failures: [], interrupted_s: null };
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

globalThis.WebSocket ??= WebSocket;
const client = new OpenAI({ baseURL, apiKey: 'none', dangerouslyAllowBrowser: true });
const inBrowser = scene === 'answer-browser';
const realtime = await (inBrowser ? OpenAIRealtimeWebSocket : OpenAIRealtimeWS).create(client, { model });
let spokeAt = null;
realtime.on('event', (event) => { report.events[event.type] = (report.events[event.type] ?? 0) + 1; });
realtime.on('response.done', (event) => {
  const calls = event.response.output.filter((item) => item.type === 'function_call');
  for (const { call_id } of calls) {
    const item = { type: 'function_call_output', call_id, output: "nine o'clock" };
    realtime.send({ type: 'conversation.item.create', item });
  }
  if (calls.length > 0) realtime.send({ type: 'response.create' });
});
realtime.on('error', (error) => report.failures.push(error.message));
realtime.on('response.output_audio_transcript.delta', (event) => { report.words += event.delta; });
realtime.on('response.output_audio.delta', (event) => {
  report.sound_s += Buffer.from(event.delta, 'base64').length / SECOND_BYTES;
});
realtime.on('input_audio_buffer.speech_started', () => {
  if (spokeAt !== null) report.interrupted_s ??= (performance.now() - spokeAt) / 1000;
});

async function say(sound, pace) {
  for (let at = 0; at < sound.length; at += PIECE_BYTES) {
    const audio = sound.subarray(at, at + PIECE_BYTES).toString('base64');
    realtime.send({ type: 'input_audio_buffer.append', audio });
    await sleep(PIECE_MS / pace);
  }
}

await new Promise((done) => {
  if (inBrowser) realtime.socket.addEventListener('open', done);
  else realtime.socket.on('open', done);
});
const clock = { type: 'function', name: 'clock', description: 'The time.', parameters: { type: 'object' } };
const session = { type: 'realtime', instructions: 'Answer briefly.', tools: [clock] };
realtime.send({ type: 'session.update', session });
if (scene === 'interrupt') {
  for (let tenths = 0; tenths < 120 && report.sound_s === 0; tenths += 1) await say(Buffer.alloc(SECOND_BYTES / 10), 1);
  spokeAt = performance.now();
  await say(question.subarray(0, 2 * SECOND_BYTES), 1);
  await say(Buffer.alloc(SECOND_BYTES), 1);
} else {
  await say(Buffer.concat([question, Buffer.alloc(8 * SECOND_BYTES)]), QUICKLY);
  await sleep(2000);
}
realtime.close();
console.log(JSON.stringify(report));
