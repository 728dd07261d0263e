// Appends samples, without a network, and prints what is sent of them: for the tests to compare.
import { connect, decodeBase64 } from "../../runtime/web/antiphon.js";

const sent = [];
const [, , samples, dialect] = process.argv;
const GREETINGS = {
  live: [{ type: "info", code: "slot_assigned" }, { type: "session.started", session: { id: "s" } }],
  realtime: [{ type: "session.created", id: "s", created: 1 }],
};

/** A server that lets every client in at once. */
class Socket {
  listeners = {};
  bufferedAmount = 0;
  constructor() {
    setTimeout(() => {
      this.tell("open", {});
      for (const event of GREETINGS[dialect]) this.tell("message", { data: JSON.stringify(event) });
    });
  }
  addEventListener(type, listener) {
    (this.listeners[type] ??= []).push(listener);
  }
  tell(type, event) {
    for (const listener of this.listeners[type] ?? []) listener(event);
  }
  send(data) {
    sent.push(JSON.parse(data));
  }
}

const mode = dialect === "live" ? "audio" : "transcription";
const session = await connect("ws://nowhere", { mode, dialect, model: "m", WebSocket: Socket });
session.append(new Float32Array(decodeBase64(samples).buffer));
if (dialect === "live") session.flush();
else session.finish();
console.log(JSON.stringify(sent));
