// What goes wrong: `node failures.mjs URL CASE`, where the peer at URL does what the case says.
import assert from "node:assert/strict";
import * as antiphon from "../../runtime/web/antiphon.js";

const [, , url, name] = process.argv;
const options = { mode: "audio", random: () => 0.999 };

const dictation = { mode: "transcription", model: "tiny", retries: 0 };

const cases = {
  async nobody() {
    await assert.rejects(antiphon.connect(url, { ...options, retries: 1 }), antiphon.CannotConnectError);
  },
  async unwelcome() {
    const origin = "https://app.example";
    const { WebSocket } = globalThis;
    class Browser extends WebSocket {
      constructor(address, protocols) {
        super(address, { protocols, headers: { origin } });
      }
    }
    const attempt = { ...options, retries: 0, WebSocket: Browser };
    globalThis.location = { origin, host: "app.example" };
    await assert.rejects(antiphon.connect(url, attempt), (error) => {
      assert.ok(error instanceof antiphon.CannotConnectError);
      return error.message.endsWith(" unless it is started with --origin https://app.example");
    });
    globalThis.location = { origin: "null", host: "" };
    await assert.rejects(antiphon.connect(url, attempt), /refuses pages that are files/);
    globalThis.location = { origin: new URL(url).origin, host: new URL(url).host };
    await assert.rejects(antiphon.connect(url, attempt), /mode=audio$/);
  },
  async refusedTwice() {
    const session = await antiphon.connect(url, { ...options, retries: 2 });
    assert.equal(session.created.sessionId, "sess_1");
    await session.close();
  },
  async refused() {
    const refused = antiphon.connect(url, { ...options, retries: 1 });
    await assert.rejects(refused, (error) => {
      assert.ok(error instanceof antiphon.SessionRefusedError);
      assert.equal(error.code, "queue_full");
      assert.equal(error.name, "SessionRefusedError");
      return true;
    });
  },
  async badInit() {
    await assert.rejects(antiphon.connect(url, options), antiphon.ReportedError);
  },
  async cancelled() {
    await assert.rejects(antiphon.connect(url, options), /closed with code 1000, cancelled/);
  },
  async nonsense() {
    await assert.rejects(antiphon.connect(url, options), antiphon.RemoteProtocolError);
  },
  async lost() {
    const session = await antiphon.connect(url, options);
    const [first, second] = [session[Symbol.asyncIterator](), session];
    assert.equal((await first.next()).value.code, "inference_error");
    await assert.rejects(first.next(), (error) => {
      assert.ok(error instanceof antiphon.SessionClosedError);
      return error.code === 1011 && error.reason === "out of memory";
    });
    assert.throws(() => second.append(new Float32Array(16_000)), antiphon.SessionClosedError);
  },
  async addresses() {
    for (const address of ["", "127.0.0.1:8006", "http://h"]) {
      await assert.rejects(antiphon.connect(address, options), antiphon.MisuseError);
    }
    const without = { ...options, WebSocket: null };
    const { WebSocket } = globalThis;
    delete globalThis.WebSocket;
    await assert.rejects(antiphon.connect(url, without), /there is no global WebSocket/);
    globalThis.WebSocket = WebSocket;
  },
  async lostWhileTelling() {
    const heard = [];
    const error = await new Promise((onEnd) => {
      antiphon.connect(url, { ...options, onEvent: (event) => heard.push(event.code), onEnd });
    });
    assert.ok(error instanceof antiphon.SessionClosedError);
    assert.deepEqual([heard, error.code], [["inference_error"], 1011]);
  },
  async nobodyToTell() {
    const onEvent = () => {};
    for (const onEnd of [undefined, null, "a function"]) {
      for (const mode of ["audio", "chat"]) {
        await assert.rejects(antiphon.connect(url, { ...options, mode, onEvent, onEnd }), (error) => {
          assert.ok(error instanceof TypeError);
          return error.message.startsWith("onEvent needs onEnd");
        });
      }
    }
  },
  async modelLost() {
    const session = await antiphon.connect(url, dictation);
    const heard = [];
    await assert.rejects(
      async () => {
        for await (const event of session) heard.push(event);
      },
      (error) => {
        assert.ok(error instanceof antiphon.SessionClosedError);
        return error.code === 1011 && error.reason === "backend_error";
      },
    );
    assert.deepEqual(heard, [
      { type: "error", code: "buffer_full", message: "not now", sessionId: "" },
      { type: "error", code: "backend_error", message: "the model was lost", sessionId: "" },
    ]);
    await session.close();
  },
  async idle() {
    const session = await antiphon.connect(url, dictation);
    await assert.rejects(session[Symbol.asyncIterator]().next(), /closed with code 1000, idle/);
    assert.throws(() => session.finish(), antiphon.SessionClosedError);
  },
  async refusedTranscription() {
    await assert.rejects(antiphon.connect(url, dictation), (error) => {
      assert.ok(error instanceof antiphon.SessionRefusedError);
      return error.code === "queue_full" && error.message.includes("the queue is full");
    });
  },
  async unread() {
    const session = await antiphon.connect(url, options);
    await session.close();
    await assert.rejects(async () => {
      for await (const _ of session);
    }, /4096 events wait/);
  },
};

await cases[name]();
console.log("ok");
