// Transcriptions against a live server that writes a word for each second that is loud enough.
import assert from "node:assert/strict";
import { connect, MisuseError, ReportedError, SessionClosedError } from "../../runtime/web/antiphon.js";

const [, , url] = process.argv;
const loud = Float32Array.from({ length: 16_000 }, (_, i) => Math.sin(i / 20) / 2);
await assert.rejects(connect(url, { mode: "transcription", record: false }), MisuseError);

const session = await connect(url, { mode: "transcription", model: "scripted" });
assert.match(session.created.sessionId, /^sess_/);
assert.throws(() => session.append([0, 1]), MisuseError);

// Words come while sound is sent, in any pieces.
const events = session[Symbol.asyncIterator]();
for (let i = 0; i < 50; i++) session.append(loud.subarray(0, 320));
const first = (await events.next()).value;
assert.deepEqual([first.type, /^\w+-0\.0 $/.test(first.text)], ["delta", true]);
session.append(loud);
session.finish();

// What is appended next is another utterance's, also before the first is answered.
const integers = Int16Array.from(loud, (sample) => Math.round(sample * 32_767));
session.append(integers);
session.finish();

let said = first.text;
const texts = [];
while (texts.length < 2) {
  const { value: event } = await events.next();
  if (event.type === "delta") {
    said += event.text;
  } else {
    assert.equal(event.type, "done");
    assert.equal(event.text, said);
    assert.equal(event.usage.total_tokens, event.usage.prompt_tokens + event.usage.completion_tokens);
    texts.push(said);
    said = "";
  }
}
assert.deepEqual(texts.map((text) => text.trim().split(" ").length), [2, 1]);
assert.equal(texts[0].split(" ")[1].split("-")[0].length, 5);

// Ten seconds and more are sent in several messages.
const long = new Float32Array(16_000 * 12);
for (let at = 0; at < 12; at++) long.set(loud, at * 16_000);
session.append(long);
session.finish();
let deltas = 0;
for (let event; (event = (await events.next()).value).type !== "done"; ) deltas += 1;
assert.equal(deltas, 12);

await session.close();
assert.equal((await events.next()).done, true);
assert.throws(() => session.append(loud), SessionClosedError);

// A model that is not there is told when something is read.
const lost = await connect(url, { mode: "transcription", model: "nobody" });
lost.append(loud);
await assert.rejects(lost[Symbol.asyncIterator]().next(), (error) => {
  assert.ok(error instanceof ReportedError);
  return error.code === "model_not_found" && error.message.includes("nobody");
});
await lost.close();

// Events are told to functions as well.
const heard = [];
const ended = new Promise((onEnd) => {
  const onEvent = (event) => {
    heard.push(event.type);
    if (event.type === "done") third.then((it) => it.close());
  };
  const options = { mode: "transcription", onEvent, onEnd }; // the server's model
  const third = connect(url, options);
  third.then((it) => (it.append(loud), it.finish()));
});
assert.equal(await ended, null);
assert.deepEqual(heard, ["delta", "done"]);
console.log("ok");
