/**
 * @typedef {{playedMs: number, cutMs: number, cut: Float32Array}} Flushed `playedMs` since it was opened
 * @typedef {object} SpeakerOptions
 * @property {number} [rate] of the samples, in Hz (24000)
 * @property {number} [cushionMs] silence before a sound that follows a pause (80)
 * @property {string} [deviceId] which one, where the browser lets a page choose
 * @property {(playedMs: number) => void} [onPlayed] is told as sound is played, twenty times a second
 * @property {() => void} [onIdle] is told when all was played
 * @property {(levels: number[], frame: number) => void} [onLevels] is told how loud it was, 0 to 1, in frames of
 *   20 ms since it was opened, while sound is played; silent frames may be left out
 */
/** The user's loudspeaker. */
export class Speaker {
    /** @returns {Promise<{id: string, name: string}[]>} the loudspeakers that there are */
    static devices(): Promise<{
        id: string;
        name: string;
    }[]>;
    /** @param {SpeakerOptions} [options] */
    constructor(options?: SpeakerOptions);
    /** Milliseconds of sound played since it was opened. */
    playedMs: number;
    /** Milliseconds of sound that are still to be played. */
    queuedMs: number;
    /** Milliseconds of sound that were thrown away, since ten minutes waited before them. */
    lostMs: number;
    /** The peak of what is played now, 0 to 1, for a meter. */
    level: number;
    onPlayed: ((playedMs: number) => void) | undefined;
    onIdle: (() => void) | undefined;
    onLevels: ((levels: number[], frame: number) => void) | undefined;
    get isOpen(): boolean;
    set volume(volume: number);
    /** How loud, 0 to 1. */
    get volume(): number;
    /** Prepare to play; call it after a click or a key. */
    open(): Promise<void>;
    /** Play another loudspeaker, where the browser lets a page choose. @param {string} deviceId */
    choose(deviceId: string): Promise<void>;
    /** @param {Float32Array} samples they are taken over: the caller's array is empty afterwards */
    play(samples: Float32Array): void;
    /**
     * Stop, at once: what plays fades out within `fadeMs`, and the rest is thrown away.
     * @param {{fadeMs?: number}} [how]
     * @returns {Promise<Flushed>} settled when it is silent, with what was not heard
     */
    flush({ fadeMs }?: {
        fadeMs?: number;
    }): Promise<Flushed>;
    /** Let go of the loudspeaker; it can be opened again, and then counts from zero. */
    close(): void;
    #private;
}
/**
 * `playedMs` since it was opened
 */
export type Flushed = {
    playedMs: number;
    cutMs: number;
    cut: Float32Array;
};
export type SpeakerOptions = {
    /**
     * of the samples, in Hz (24000)
     */
    rate?: number | undefined;
    /**
     * silence before a sound that follows a pause (80)
     */
    cushionMs?: number | undefined;
    /**
     * which one, where the browser lets a page choose
     */
    deviceId?: string | undefined;
    /**
     * is told as sound is played, twenty times a second
     */
    onPlayed?: ((playedMs: number) => void) | undefined;
    /**
     * is told when all was played
     */
    onIdle?: (() => void) | undefined;
    /**
     * is told how loud it was, 0 to 1, in frames of
     * 20 ms since it was opened, while sound is played; silent frames may be left out
     */
    onLevels?: ((levels: number[], frame: number) => void) | undefined;
};
