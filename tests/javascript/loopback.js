// Run in a page before its own scripts: its microphone hears its loudspeaker, 150 ms later and 30 dB quieter, as
// without headphones and echo cancellation. `hears.user` is how loud it hears what it would hear anyway.

globalThis.hears = { speaker: 0.032, user: 1 };
(() => {
  const own = { connect: AudioNode.prototype.connect, createSource: AudioContext.prototype.createMediaStreamSource };
  /** What the loudspeaker plays, as a stream. @type {MediaStream | null} */ let played = null;
  AudioNode.prototype.connect = function (to, ...more) {
    if (to === this.context.destination && this instanceof GainNode) {
      const stream = new MediaStreamAudioDestinationNode(this.context, { channelCount: 1 });
      own.connect.call(this, stream);
      played = stream.stream;
    }
    return own.connect.call(this, to, ...more);
  };
  AudioContext.prototype.createMediaStreamSource = function (stream) {
    const mixed = new GainNode(this);
    const mix = (heard, gain, delayTime) => {
      const late = own.connect.call(own.createSource.call(this, heard), new DelayNode(this, { delayTime }));
      own.connect.call(own.connect.call(late, new GainNode(this, { gain })), mixed);
    };
    mix(stream, hears.user, 0);
    if (played) mix(played, hears.speaker, 0.15);
    return mixed;
  };
})();
