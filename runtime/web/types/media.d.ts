export { Camera } from "./camera.js";
export { Conversation } from "./conversation.js";
export { Speaker } from "./speaker.js";
export { DeviceError, Microphone } from "./microphone.js";
