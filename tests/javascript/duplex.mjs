// A duplex session against a live server, from its beginning to its end.
import assert from "node:assert/strict";
import { connect, MisuseError, SessionClosedError } from "../../runtime/web/antiphon.js";

const [, , url, mode] = process.argv;
const JPEG = new Uint8Array(Buffer.from(process.argv[4], "base64"));

const session = await connect(url, { mode, instructions: "Be brief.", config: { top_k: 20 } });
assert.match(session.created.sessionId, /^sess_/);
assert.equal(session.created.recording, "off");

const frames = mode === "video" ? [JPEG] : [];
for (let i = 0; i < 250; i++) session.append(new Float32Array(320), i % 50 ? [] : frames);
session.append(new Float32Array(100));
session.flush();
if (mode === "audio") assert.throws(() => session.append(new Float32Array(1), [JPEG]), MisuseError);
assert.throws(() => session.append([0, 1]), MisuseError);

const heard = [];
for await (const event of session) {
  heard.push(event);
  if (event.type === "listen" && heard.some((said) => said.type === "speech")) {
    session.close("enough");
  }
}
assert.deepEqual(heard.slice(0, 3).map((event) => event.type), ["listen", "listen", "listen"]);
assert.deepEqual(heard.at(-1), { type: "closed", reason: "enough" });
const speech = heard.filter((event) => event.type === "speech");
assert.equal(speech.map((event) => event.text).join(""), "this is second 3, that was second 4.");
assert.equal(speech.reduce((sum, event) => sum + event.audio.length, 0), 42_000);
assert.ok(speech.every((event) => event.audio.every(Number.isFinite)));
assert.ok(speech.at(-1).endOfTurn);
assert.equal(new Set(speech.map((event) => event.responseId)).size, 1);
assert.ok(heard[0].metrics.kv_cache_length > 0);
assert.throws(() => session.append(new Float32Array(16_000)), SessionClosedError);
await session.close();
console.log("ok");
