// Changes the rate of tones, in blocks of odd sizes: prints each tone's level after it, and the counts.
import { Resampler } from "../../runtime/web/worklets.js";

const [, , from, to, ...tones] = process.argv.map(Number);
const told = tones.map((tone) => {
  const resampler = new Resampler(from, to);
  const pieces = [];
  for (let at = 0, block = 1; at < 2 * from; at += block, block = ((block * 7) % 500) + 1) {
    const size = Math.min(block, 2 * from - at);
    pieces.push(
      resampler.push(
        Float32Array.from({ length: size }, (_, i) => Math.sin((2 * Math.PI * tone * (at + i)) / from)),
      ),
    );
  }
  const made = pieces.flatMap((piece) => [...piece]);
  const middle = made.slice(to / 2, to + to / 2);
  return { count: made.length, level: Math.sqrt(middle.reduce((sum, it) => sum + it * it, 0) / middle.length) };
});
console.log(JSON.stringify(told));
