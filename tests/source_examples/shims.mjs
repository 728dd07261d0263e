// Runs a JavaScript client of 004 as it is, in a world that has been bent to it by these shims alone.
//
// Called as `node --experimental-websocket shims.mjs CLIENT HOST:PORT VOICE`; VOICE is a file with
// reference audio, float32 LE of 16 kHz.
//
// shim                 why
// location             a browser's; says where the page came from, and so where the server is
// WebSocket            Node's own, but for the URL's scheme: TLS is spoken in front of the server
// getRefAudioBase64    the page's; reads the reference audio
// playAudio            the page's; counts what it is given and says so at the end

import { readFileSync } from 'node:fs';

const [client, host, voice] = process.argv.slice(2);

class PlainWebSocket extends WebSocket {
  constructor(url) {
    super(url.replace(/^wss:/, 'ws:'));
  }
}

let samples = 0;
const playAudio = (base64) => {
  samples += Buffer.from(base64, 'base64').length / 4;
};
process.on('exit', () => console.log(`Played ${samples} samples`));

const getRefAudioBase64 = () => readFileSync(voice).toString('base64');
const names = ['location', 'WebSocket', 'getRefAudioBase64', 'playAudio'];
const run = new Function(...names, readFileSync(client, 'utf8'));
run({ host }, PlainWebSocket, getRefAudioBase64, playAudio);
