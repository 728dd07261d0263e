// Cuts sound as told, without a network, and prints what would be sent: for the tests to compare.
import { connect } from "../../runtime/web/antiphon.js";

const steps = JSON.parse(process.argv[2]);
const sent = [];

/** A server that lets every client in at once. */
class Socket {
  listeners = {};
  bufferedAmount = 0;
  constructor() {
    setTimeout(() => (this.tell("open", {}), this.say({ type: "session.queue_done" })));
  }
  addEventListener(type, listener) {
    (this.listeners[type] ??= []).push(listener);
  }
  tell(type, event) {
    for (const listener of this.listeners[type] ?? []) listener(event);
  }
  say(event) {
    this.tell("message", { data: JSON.stringify(event) });
  }
  send(data) {
    const message = JSON.parse(data);
    if (message.type === "session.init") this.say({ type: "session.created", session_id: "s" });
    else sent.push(message.input);
  }
  close() {
    this.tell("close", { code: 1000, reason: "" });
  }
}

const session = await connect("ws://nowhere", { mode: "video", WebSocket: Socket });
let next = 0;
for (const [samples, frames, action] of steps) {
  const sound = Float32Array.from({ length: samples }, () => next++ / 1_000_000);
  session.append(sound, frames);
  if (action === "interrupt") session.interrupt();
  if (action === "flush") session.flush();
}
console.log(JSON.stringify(sent));
