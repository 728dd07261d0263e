/**
 * Make a `DeviceError` of what a browser throws.
 * @param {unknown} error @param {string} device its name, for people
 * @returns {DeviceError}
 */
export function deviceError(error: unknown, device: string): DeviceError;
/**
 * List devices; their names are empty until the page may use one.
 * @param {"audioinput" | "audiooutput" | "videoinput"} kind
 * @returns {Promise<{id: string, name: string}[]>}
 */
export function devices(kind: "audioinput" | "audiooutput" | "videoinput"): Promise<{
    id: string;
    name: string;
}[]>;
/** Why a device cannot be used. */
export class DeviceError extends AntiphonError {
    /**
     * @param {"refused" | "missing" | "busy" | "insecure" | "unsupported"} reason
     * @param {string} message
     */
    constructor(reason: "refused" | "missing" | "busy" | "insecure" | "unsupported", message: string);
    reason: "refused" | "missing" | "busy" | "insecure" | "unsupported";
}
/**
 * @typedef {object} MicrophoneOptions
 * @property {string} [deviceId] which one; by default the browser's
 * @property {boolean} [echoCancellation] takes out what the page plays (true)
 * @property {boolean} [noiseSuppression] (true)
 * @property {boolean} [autoGainControl] (true)
 * @property {(samples: Float32Array) => void} [onSamples] is told each block
 * @property {(error: DeviceError) => void} [onLost] is told when the device is gone
 */
/** The user's microphone. */
export class Microphone {
    /** @returns {Promise<{id: string, name: string}[]>} the microphones that there are */
    static devices(): Promise<{
        id: string;
        name: string;
    }[]>;
    /** @param {MicrophoneOptions} [options] */
    constructor(options?: MicrophoneOptions);
    /** The loudness now, 0 to 1, for a meter; what was loud falls within a third of a second. */
    level: number;
    onSamples: ((samples: Float32Array) => void) | undefined;
    onLost: ((error: DeviceError) => void) | undefined;
    get isOpen(): boolean;
    set muted(muted: boolean);
    /** Whether silence goes out in place of what is heard. */
    get muted(): boolean;
    /** @throws {DeviceError} it is refused, missing, or in use */
    open(): Promise<void>;
    /** Take another microphone, from now on if it is open. @param {string} deviceId */
    choose(deviceId: string): Promise<void>;
    /** Let go of the microphone; it can be opened again. */
    close(): void;
    #private;
}
export type MicrophoneOptions = {
    /**
     * which one; by default the browser's
     */
    deviceId?: string | undefined;
    /**
     * takes out what the page plays (true)
     */
    echoCancellation?: boolean | undefined;
    /**
     * (true)
     */
    noiseSuppression?: boolean | undefined;
    /**
     * (true)
     */
    autoGainControl?: boolean | undefined;
    /**
     * is told each block
     */
    onSamples?: ((samples: Float32Array) => void) | undefined;
    /**
     * is told when the device is gone
     */
    onLost?: ((error: DeviceError) => void) | undefined;
};
import { AntiphonError } from "./antiphon.js";
