/* Speech slower or faster, at its own pitch.
 *
 * Overlapping windows of the sound are laid closer together, or further apart, each where it fits
 * best what was placed before (waveform similarity overlap-add: Verhelst and Roelands, ICASSP 1993).
 */

const WINDOW_S = 0.04;
const SEARCH_S = 0.01;
/** Every so many samples are compared: speech has its strength below 4 kHz. */
const STRIDE = 6;

/** Samples that last `1 / speed` as long; `rate` samples a second. */
export function stretched(samples, rate, speed) {
  if (speed === 1) return samples;
  const hop = Math.round((WINDOW_S * rate) / 2);
  const search = Math.round(SEARCH_S * rate);
  const length = Math.round(samples.length / speed);
  const made = new Float32Array(length + 2 * hop);
  const rise = Float32Array.from({ length: hop }, (_, i) => 0.5 - 0.5 * Math.cos((Math.PI * i) / hop));
  let before = 0;
  for (let i = 0; i < hop && i < samples.length; i++) made[i] = samples[i];
  for (let at = 0; at < length; at += hop) {
    const from = at ? bestPlace(samples, before + hop, Math.round(at * speed), hop, search) : 0;
    for (let i = 0; i < hop; i++) {
      const old = made[at + i];
      made[at + i] = old + ((samples[from + i] ?? 0) - old) * (at ? rise[i] : 1);
      made[at + hop + i] = samples[from + hop + i] ?? 0;
    }
    before = from;
  }
  return made.subarray(0, length);
}

/* The place near `wanted` at which the sound is most like the sound at `natural`. */
function bestPlace(samples, natural, wanted, hop, search) {
  let best = wanted;
  let most = -Infinity;
  for (let shift = -search; shift <= search; shift += 4) {
    const from = wanted + shift;
    if (from < 0) continue;
    let like = 0;
    let power = 1e-9;
    for (let i = 0; i < hop; i += STRIDE) {
      const sample = samples[from + i] ?? 0;
      like += sample * (samples[natural + i] ?? 0);
      power += sample * sample;
    }
    const share = like / Math.sqrt(power);
    if (share > most) [most, best] = [share, from];
  }
  return best;
}
