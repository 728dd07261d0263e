/**
 * @typedef {{correlation: number, delayMs: number, isHeard: boolean}} EchoEvent the highest correlation of all
 *   delays, 0 to 1; `isHeard`: it is clear, or was found twice in a row, until it is not found twice in a row
 */
export class EchoMeter {
    /** @param {(echo: EchoEvent) => void} tell */
    constructor(tell: (echo: EchoEvent) => void);
    /** @param {ArrayLike<number>} levels of played frames, 0 to 1 @param {number} frame the first one's number */
    play(levels: ArrayLike<number>, frame: number, now?: number): void;
    /** @param {Float32Array} samples of the microphone, of any number */
    hear(samples: Float32Array, now?: number): void;
    #private;
}
/**
 * the highest correlation of all
 *   delays, 0 to 1; `isHeard`: it is clear, or was found twice in a row, until it is not found twice in a row
 */
export type EchoEvent = {
    correlation: number;
    delayMs: number;
    isHeard: boolean;
};
