// Run in a page before its own scripts: counts, and keeps, the sound that its audio worklets get and make.
//
// A tap is a worklet beside another one in the same graph: it is given the same blocks of 128 samples.
// `taps` has them all, in the order in which they were made: first what the page's microphone brings
// (`kind` "microphone"), or what its loudspeaker plays ("speaker"). `countMicrophone()` opens a microphone
// on a page that has none, with nothing but a tap.

(() => {
  const KEPT = 1600;
  const TAP = `registerProcessor("tap", class extends AudioWorkletProcessor {
    #counts = { frames: 0, silent: 0, silentNow: 0, beganMs: 0, lastMs: 0, longestMs: 0 };
    #held = [];
    constructor() {
      super();
      this.port.onmessage = () => this.#tell(true);
    }
    process([channels]) {
      const [now, counts] = [Date.now(), this.#counts];
      if (counts.beganMs) counts.longestMs = Math.max(counts.longestMs, now - counts.lastMs);
      counts.beganMs ||= now;
      counts.lastMs = now;
      const samples = channels?.[0] ?? new Float32Array(128);
      counts.frames += samples.length;
      const isSilent = samples.every((it) => it === 0);
      if (isSilent) counts.silent += samples.length;
      counts.silentNow = isSilent ? counts.silentNow + samples.length : 0;
      this.#held.push(...samples);
      if (this.#held.length >= ${KEPT}) this.#tell(false);
      return true;
    }
    #tell(isLast) {
      this.port.postMessage({ counts: this.#counts, samples: Float32Array.from(this.#held), isLast });
      this.#held = [];
    }
  });`;
  const own = {
    addModule: AudioWorklet.prototype.addModule,
    createSource: AudioContext.prototype.createMediaStreamSource,
    close: AudioContext.prototype.close,
    Node: AudioWorkletNode,
  };
  globalThis.taps = [];

  function tap(kind, source) {
    const node = new own.Node(source.context, "tap", { channelCount: 1, channelCountMode: "explicit" });
    const made = { kind, rate: source.context.sampleRate, context: source.context, counts: null, pieces: [] };
    made.flushed = new Promise((resolve) => {
      node.port.onmessage = ({ data: { counts, samples, isLast } }) => {
        made.counts = counts;
        if (made.keeps) made.pieces.push(samples);
        if (isLast) resolve();
      };
    });
    made.keeps = true;
    made.flush = () => (node.port.postMessage("flush"), made.flushed);
    source.connect(node).connect(source.context.destination); // silent
    taps.push(made);
    return made;
  }

  AudioWorklet.prototype.addModule = async function (...module) {
    await own.addModule.call(this, `data:text/javascript,${encodeURIComponent(TAP)}`);
    return own.addModule.apply(this, module);
  };
  AudioContext.prototype.createMediaStreamSource = function (stream) {
    const source = own.createSource.call(this, stream);
    tap("microphone", source);
    return source;
  };
  AudioContext.prototype.close = async function () {
    await Promise.all(taps.filter((it) => it.context === this).map((it) => it.flush()));
    return own.close.call(this);
  };
  globalThis.AudioWorkletNode = class extends own.Node {
    constructor(context, name, options) {
      super(context, name, options);
      if (name === "antiphon-speaker") tap("speaker", this);
    }
  };

  /** The samples of a tap as base64, float32: `count` pieces from piece `from` on. */
  globalThis.tapped = (index, from, count) => {
    const pieces = taps[index].pieces.slice(from, from + count);
    const bytes = new Uint8Array(new Float32Array(pieces.flatMap((it) => [...it])).buffer);
    let text = "";
    for (let at = 0; at < bytes.length; at += 0x8000)
      text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
    return btoa(text);
  };

  /** Whether the loudspeaker has played nothing for so many seconds. */
  globalThis.isQuiet = (seconds) => {
    const { counts, rate } = taps.find(({ kind }) => kind === "speaker");
    return counts.silentNow > seconds * rate;
  };

  globalThis.countMicrophone = async (constraints, options) => {
    const stream = await navigator.mediaDevices.getUserMedia({ audio: constraints });
    const context = new AudioContext(options);
    await context.audioWorklet.addModule("data:text/javascript,");
    context.createMediaStreamSource(stream);
    taps.at(-1).keeps = false;
    await context.resume();
  };
})();
