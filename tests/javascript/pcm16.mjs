// Appends samples, without a network, and prints what is sent of them: for the tests to compare.
import { connect, decodeBase64 } from "../../runtime/web/antiphon.js";

const sent = [];

/** A server that lets every client in at once. */
class Socket {
  listeners = {};
  bufferedAmount = 0;
  constructor() {
    setTimeout(() => {
      this.tell("open", {});
      this.tell("message", { data: JSON.stringify({ type: "session.created", id: "s", created: 1 }) });
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

const session = await connect("ws://nowhere", { mode: "transcription", model: "m", WebSocket: Socket });
session.append(new Float32Array(decodeBase64(process.argv[2]).buffer));
session.finish();
console.log(JSON.stringify(sent));
