// Events told to functions, an interruption, and a place in the queue, against a server of one slot.
import assert from "node:assert/strict";
import { connect } from "../../runtime/web/antiphon.js";

const [, , url] = process.argv;
const heard = [];
const places = [];

const ended = new Promise((resolve) => {
  connect(url, { mode: "audio", onEvent: (event) => heard.push(event.type), onEnd: resolve }).then(
    async (first) => {
      const waiting = connect(url, { mode: "audio", onQueue: (place) => told(place) });
      const told = async (place) => {
        places.push(place.position);
        first.append(new Float32Array(20_000));
        first.interrupt();
        await first.close();
        const second = await waiting;
        await second.close();
        resolveSecond();
      };
    },
  );
});
let resolveSecond;
const second = new Promise((resolve) => (resolveSecond = resolve));

assert.equal(await ended, null);
await second;
assert.equal(heard.at(-1), "closed");
assert.deepEqual(places, [1]);
console.log("ok");
