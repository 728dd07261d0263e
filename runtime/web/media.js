/**
 * What a page that talks needs in addition to the connection: microphone, loudspeaker, camera, and a
 * conversation that joins them.
 *
 * `antiphon.js` is the connection in one file, without anything of a browser but its WebSocket. The
 * classes here need the browser's audio thread, which takes its code from a file of its own
 * (`worklets.js`); so they are files next to it, and this one names them.
 */

export { Camera } from "./camera.js";
export { Conversation } from "./conversation.js";
export { DeviceError, Microphone } from "./microphone.js";
export { Speaker } from "./speaker.js";
