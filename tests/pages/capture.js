// Hands the microphone's samples over, in pieces of 100 ms at 16 kHz.

class Capture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.samples = [];
  }

  process([input]) {
    if (input.length) this.samples.push(...input[0]);
    while (this.samples.length >= 1600) {
      this.port.postMessage(new Float32Array(this.samples.splice(0, 1600)));
    }
    return true;
  }
}

registerProcessor("capture", Capture);
