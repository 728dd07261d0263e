// A session of `live` against a live server, and its fork; and one whose user's words are written down.
import assert from "node:assert/strict";
import { connect, MisuseError, ReportedError, SessionClosedError } from "../../runtime/web/antiphon.js";

const [, , url, words] = process.argv;
const asked = { mode: "audio", dialect: "live", model: "scripted" };
for (const wrong of [{ config: {} }, { voice: {} }, { onSent: () => {} }, { mode: "video" }, { dialect: "openai" }]) {
  await assert.rejects(connect(url, { ...asked, ...wrong }), MisuseError);
}
await assert.rejects(connect(url, { ...asked, model: "nobody" }), (error) => {
  assert.ok(error instanceof ReportedError);
  return error.code === "model_not_found";
});

/** Say seconds, and end the session after as many answers; what was told. */
async function talk(session, seconds) {
  session.append(new Float32Array(seconds * 16_000 - 1));
  session.flush();
  const heard = [];
  let answered = 0;
  for await (const event of session) {
    heard.push(event);
    answered += event.type === "listen" || event.audio?.length > 0;
    if (event.audio?.length > 0) assert.equal(event.audio.length, 24_000);
    if (answered === seconds && event.type !== "closed") session.close();
  }
  return heard;
}

if (words) {
  const places = [];
  const told = [];
  const onQueue = ({ message }) => places.push(message);
  for await (const event of await connect(words, { ...asked, onQueue })) told.push(event);
  assert.deepEqual(places, ["position 1 of 1"]);
  assert.deepEqual(told, [
    { type: "words", text: "hello", startMs: 200, endMs: 700 },
    { type: "closed", reason: "expired" },
  ]);
}

const session = await connect(url, { ...asked, instructions: "Be brief." });
const { sessionId } = session.created;
assert.match(sessionId, /^sess_/);
assert.equal(session.created.recording, "on");
assert.throws(() => session.interrupt(), MisuseError);
assert.throws(() => session.acknowledge(0), MisuseError);
assert.throws(() => session.close("enough"), MisuseError);
const heard = await talk(session, 5);
assert.deepEqual(
  heard.map(({ type, text }) => text || type),
  ["listen", "listen", "listen", "this is second 3, ", "speech", "that was second 4.", "speech", "closed"],
);
assert.ok(heard[4].audio.some(Boolean) && heard[4].audio.every((sample) => Math.abs(sample) <= 1));
assert.deepEqual(heard.at(-1), { type: "closed", reason: "close_requested" });
assert.throws(() => session.append(new Float32Array(16_000)), SessionClosedError);

const fork = await connect(new URL(`/v1/live/sessions/${sessionId}/fork?at=4`, url).href, asked);
assert.notEqual(fork.created.sessionId, sessionId);
assert.deepEqual((await talk(fork, 1)).map(({ type, text }) => text || type), ["that was second 4.", "speech", "closed"]);
console.log("ok");
