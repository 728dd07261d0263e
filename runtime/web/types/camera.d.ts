/**
 * @typedef {"front" | "back" | "screen"} CameraSource the camera that looks at the user, the other one, or
 *   what a screen or window shows
 * @typedef {object} CameraOptions
 * @property {CameraSource} [source] ("front")
 * @property {string} [deviceId] which camera, instead of front or back
 * @property {number} [sideMax] pixels of the longer side of a picture (640)
 * @property {number} [quality] of the JPEG files, 0 to 1 (0.75)
 * @property {(error: DeviceError) => void} [onLost] is told when the device is gone, or the screen no longer shared
 */
/** The user's camera, or what a screen shows. */
export class Camera {
    /** @returns {Promise<{id: string, name: string}[]>} the cameras that there are */
    static devices(): Promise<{
        id: string;
        name: string;
    }[]>;
    /** @param {CameraOptions} [options] */
    constructor(options?: CameraOptions);
    /** What it shows, for a `<video>`; null while it is closed. @type {MediaStream | null} */
    stream: MediaStream | null;
    source: CameraSource;
    onLost: ((error: DeviceError) => void) | undefined;
    get isOpen(): boolean;
    /** @throws {DeviceError} it is refused, missing, or in use */
    open(): Promise<void>;
    /** @returns {Promise<Uint8Array | null>} what is seen now, as JPEG; null before the first picture */
    capture(): Promise<Uint8Array | null>;
    /** Let go of the camera; it can be opened again. */
    close(): void;
    #private;
}
/**
 * the camera that looks at the user, the other one, or
 *   what a screen or window shows
 */
export type CameraSource = "front" | "back" | "screen";
export type CameraOptions = {
    /**
     * ("front")
     */
    source?: CameraSource | undefined;
    /**
     * which camera, instead of front or back
     */
    deviceId?: string | undefined;
    /**
     * pixels of the longer side of a picture (640)
     */
    sideMax?: number | undefined;
    /**
     * of the JPEG files, 0 to 1 (0.75)
     */
    quality?: number | undefined;
    /**
     * is told when the device is gone, or the screen no longer shared
     */
    onLost?: ((error: DeviceError) => void) | undefined;
};
import { DeviceError } from "./microphone.js";
