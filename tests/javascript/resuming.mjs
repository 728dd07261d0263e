// A conversation through connections that are cut: prints what was sent, and what its user heard.
import assert from "node:assert/strict";
import { connect } from "../../runtime/web/antiphon.js";

const [, , url, kind] = process.argv;
const [mode, dialect] = kind === "live" ? ["audio", "live"] : [kind, "realtime"];
const sent = new Set();
const changes = [];

/** Notes each message once: all of them differ. */
class Tapped extends WebSocket {
  send(data) {
    if (JSON.parse(data).type !== "session.resume") sent.add(data);
    super.send(data);
  }
}

const onConnection = ({ type }) => changes.push(type);
const session = await connect(url, { mode, dialect, model: "scripted", WebSocket: Tapped, onConnection });
const { sessionId } = session.created;
const sound = (level) => Float32Array.from({ length: 16_000 }, (_, i) => level * Math.sin(i / 20));
const heard = [];
const hear = ({ type, text, reason }) => heard.push([type, text ?? reason ?? ""]);
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function speak() {
  for (let second = 1; second <= 6; second++) {
    session.append(sound(second / 10));
    await pause(100);
  }
}

if (mode === "chat") {
  for (let turn = 0; turn < 3; turn++) {
    for await (const piece of await session.ask(`${turn} two three four five six `.repeat(40))) hear(piece);
  }
  await session.close("enough");
} else {
  const speaking = speak().then(() => (mode === "audio" ? pause(500) : session.finish()));
  if (mode === "audio") speaking.then(() => session.close(dialect === "live" ? undefined : "enough"));
  for await (const event of session) {
    hear(event);
    if (event.type === "done") break;
  }
  await session.close();
}
assert.equal(changes.at(-1), "reconnected");
console.log(JSON.stringify({ sessionId, sent: [...sent], heard }));
