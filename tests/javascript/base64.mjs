// The base64 helpers, with and without what an engine brings of its own.
import assert from "node:assert/strict";
import { decodeBase64, encodeBase64 } from "../../runtime/web/antiphon.js";

const { Buffer } = globalThis;

function check() {
  for (const length of [0, 1, 2, 3, 4, 255, 32_768, 32_769, 100_000]) {
    const bytes = Uint8Array.from({ length }, (_, i) => (i * 7) % 256);
    const text = Buffer.from(bytes).toString("base64");
    assert.equal(encodeBase64(bytes), text);
    assert.equal(encodeBase64(bytes.buffer), text);
    assert.deepEqual(decodeBase64(text), bytes);
    assert.equal(decodeBase64(text).byteOffset, 0);
  }
  const samples = Float32Array.from([0, 0.5, -1, 1]);
  assert.deepEqual(new Float32Array(decodeBase64(encodeBase64(samples)).buffer), samples);
  assert.equal(encodeBase64(samples.subarray(1, 2)), "AAAAPw==");
}

check();
delete globalThis.Buffer; // as in a browser
check();
globalThis.Buffer = Buffer;
Uint8Array.prototype.toBase64 ??= function () {
  return Buffer.from(this).toString("base64");
};
Uint8Array.fromBase64 ??= (text) => new Uint8Array(Buffer.from(text, "base64"));
check();
console.log("ok");
