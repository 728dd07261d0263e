// Tools of a duplex session, against a live server whose model calls the first one now and then.
import assert from "node:assert/strict";
import { connect, MisuseError } from "../../runtime/web/antiphon.js";

const [, , url] = process.argv;

/** Talk until the model has said what its calls came to; `act` is told each event. */
async function talk(tools, act = () => {}) {
  const session = await connect(url, { mode: "audio", tools });
  assert.equal(session.created.tools, "called");
  session.append(new Float32Array(16_000));
  const [calls, texts] = [[], []];
  for await (const event of session) {
    act(event, session);
    if (event.type === "call") calls.push(event);
    if (event.type === "error") throw new Error(event.message);
    if (event.type === "speech" && event.text.startsWith("it is")) {
      texts.push(event.text);
      session.close();
    } else if ((event.type === "speech" && event.audio.length) || event.type === "listen") {
      await new Promise((resolve) => setTimeout(resolve, 20)); // for the result
      if (!texts.length) session.append(new Float32Array(16_000));
    }
  }
  return [calls, texts];
}

const parameters = { type: "object", properties: {} };
const given = [];
const clock = { description: "Tells the time.", parameters, run: (...all) => (given.push(all), "nine") };
const [[call], texts] = await talk({ clock, other: () => "" });
assert.deepEqual(call, { type: "call", id: call.id, name: "clock", arguments: "{}", unit: 2 });
assert.deepEqual(given, [[{}, call]]);
assert.deepEqual(texts, ["it is nine."]);

const results = [
  [async () => ({ hour: 9 }), 'it is {"hour":9}.'],
  [() => undefined, "it is null."],
  [() => Promise.reject(new Error("no clock")), "it is error: no clock."],
  [() => "😀".repeat(5_000), `it is ${"😀".repeat(64)}.`],
];
for (const [clock, said] of results) assert.deepEqual((await talk({ clock }))[1], [said]);

const byHand = (event, session) => event.type === "call" && session.giveResult(event.id, "ten");
assert.deepEqual((await talk({ clock: { description: "Tells the time." } }, byHand))[1], ["it is ten."]);

for (const options of [{ mode: "chat" }, { mode: "transcription" }, { mode: "audio", dialect: "live" }]) {
  await assert.rejects(connect(url, { ...options, tools: { clock } }), MisuseError);
}
console.log("ok");
