// Turns of chat against a live server whose model says what it was told.
import assert from "node:assert/strict";
import { connect, MisuseError, ReportedError } from "../../runtime/web/antiphon.js";

const [, , url, jpeg] = process.argv;
const chat = await connect(url, { mode: "chat" });

const answer = await chat.ask("Good morning!");
await assert.rejects(chat.ask("too early"), MisuseError);
const pieces = [];
for await (const piece of answer) pieces.push(piece);
const response = pieces.at(-1);
assert.equal(response, answer.response);
assert.equal(response.type, "response");
assert.equal(response.reason, "turn_end");
assert.equal(response.text, "turn 0: Good morning! (0 pictures, 0 sounds)");
assert.ok(pieces.length > 2);
assert.equal(pieces.slice(0, -1).map((piece) => piece.text).join(""), response.text);

const conversation = [
  { role: "system", content: "Be brief." },
  {
    role: "user",
    content: [
      { type: "text", text: "look" },
      { type: "image", data: new Uint8Array(Buffer.from(jpeg, "base64")) },
      { type: "audio", data: new Float32Array(16_000) },
    ],
  },
];
const whole = await chat.answer(conversation, { speech: true, generation: { max_new_tokens: 64 } });
assert.match(whole.text, /\(1 pictures, 1 sounds\)$/);
assert.ok(whole.audio.length > 0);

await assert.rejects(
  chat.answer([{ role: "user", content: "x" }], { generation: { top_p: 7 } }),
  (error) => error instanceof ReportedError && error.sessionId === chat.created.sessionId,
);
assert.match((await chat.answer("still there?")).text, /still there/);

const tools = [{ type: "function", function: { name: "clock", description: "Tells the time." } }];
const asked = { role: "user", content: "Read the clock please" };
const calling = await chat.answer([asked], { tools });
assert.equal(calling.reason, "tool_calls");
const [call] = calling.toolCalls;
assert.equal(call.function.name, "clock");
const told = await chat.answer(
  [
    asked,
    { role: "assistant", content: null, tool_calls: [call] },
    { role: "tool", tool_call_id: call.id, content: "10:30" },
  ],
  { tools },
);
assert.match(told.text, /it is 10:30/);
assert.deepEqual(told.toolCalls, []);

const spoken = await chat.ask("speak", { speech: { mode: "default" } });
let samples = 0;
for await (const piece of spoken) samples += piece.audio.length;
assert.ok(samples > 0);
const long = await chat.ask("a question to be cut");
chat.cancel();
assert.equal((await long.finish()).reason, "interrupted");
chat.cancel(); // too late
assert.match((await chat.answer("go on")).text, /go on/);
await chat.close("done");
console.log("ok");
