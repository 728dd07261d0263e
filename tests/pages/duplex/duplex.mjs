// A page like those that demos of MiniCPM-o have: it looks at /status, takes the default voice,
// opens /ws/duplex, sends `prepare` 100 ms after the connection is open and never again, gives up
// on any error until it is prepared, and then sends what its microphone hears.

const page = {
  state: "idle",
  workers: "",
  voice: null,
  queued: 0,
  results: 0,
  text: "",
  errors: [],
  samplesSent: 0,
};
window.page = page;

function say(text) {
  document.getElementById("log").textContent += `${text}\n`;
}

function base64(samples) {
  return btoa(String.fromCharCode(...new Uint8Array(samples.buffer)));
}

async function load() {
  const status = await (await fetch("/status")).json();
  page.workers = `${status.idle_workers}/${status.total_workers}`;
  const voice = await fetch("/api/default_ref_audio");
  page.voice = voice.ok ? await voice.json() : null;
  const presets = await fetch("/api/presets");
  if (presets.ok) say("presets");
  page.state = "loaded";
}

async function listen() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const context = new AudioContext({ sampleRate: 16000 });
  await context.audioWorklet.addModule("/static/capture.js");
  const capture = new AudioWorkletNode(context, "capture");
  let second = [];
  capture.port.onmessage = ({ data }) => {
    second.push(...data);
    if (second.length < 16000 || page.socket.readyState !== WebSocket.OPEN) return;
    const audio = base64(new Float32Array(second.splice(0, 16000)));
    page.socket.send(JSON.stringify({ type: "audio_chunk", audio_base64: audio }));
    page.samplesSent += 16000;
  };
  context.createMediaStreamSource(stream).connect(capture);
}

function heard(message) {
  if (message.type === "queued" || message.type === "queue_update") page.queued += 1;
  if (message.type === "error") page.errors.push(message.error);
  if (message.type === "result") {
    page.results += 1;
    page.text += message.text || "";
    say(message.is_listen ? "listens" : `says ${message.text}`);
  }
}

page.start = async () => {
  page.state = "connecting";
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const name = `adx_${Date.now().toString(36)}`;
  page.socket = new WebSocket(`${scheme}://${location.host}/ws/duplex/${name}`);
  page.socket.onclose = () => { page.state = page.state === "running" ? "over" : "refused"; };
  const prepare = {
    type: "prepare",
    system_prompt: "You are a helpful assistant.",
    ref_audio_base64: page.voice?.base64,
  };
  page.socket.onopen = () => setTimeout(() => page.socket.send(JSON.stringify(prepare)), 100);
  page.socket.onmessage = async ({ data }) => {
    const message = JSON.parse(data);
    heard(message);
    if (message.type === "prepared") {
      page.state = "running";
      await listen();
    }
  };
};

page.stop = () => page.socket.send(JSON.stringify({ type: "stop" }));

await load();
