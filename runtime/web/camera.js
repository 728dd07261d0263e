/**
 * A camera or a screen as JPEG pictures, each taken when it is asked for.
 *
 *     const camera = new Camera({ source: "front" });
 *     await camera.open();
 *     preview.srcObject = camera.stream;          // a <video>
 *     const jpeg = await camera.capture();        // Uint8Array
 *
 * Errors are a `DeviceError`, as those of `Microphone`.
 */

import { DeviceError, deviceError, devices } from "./microphone.js";

/** The longer side of a picture: the model cuts it into slices of 448. */
const SIDE_MAX = 640;
const QUALITY = 0.75;

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
  /** What it shows, for a `<video>`; null while it is closed. @type {MediaStream | null} */
  stream = null;
  #options;
  /** @type {HTMLVideoElement | null} */ #video = null;
  #turn = 0;

  /** @param {CameraOptions} [options] */
  constructor(options = {}) {
    this.#options = options;
    this.source = options.source ?? "front";
    this.onLost = options.onLost;
  }

  /** @returns {Promise<{id: string, name: string}[]>} the cameras that there are */
  static devices() {
    return devices("videoinput");
  }

  get isOpen() {
    return this.stream !== null;
  }

  /** @throws {DeviceError} it is refused, missing, or in use */
  async open() {
    if (this.stream) return;
    const device = this.source === "screen" ? "screen" : "camera";
    const turn = ++this.#turn;
    try {
      const stream = await this.#ask();
      if (turn !== this.#turn) return stream.getTracks().forEach((track) => track.stop()); // closed meanwhile
      this.stream = stream;
      const [track] = stream.getVideoTracks();
      track.addEventListener("ended", () => {
        if (this.stream !== stream) return;
        this.close();
        this.onLost?.(new DeviceError("missing", `${device}: it was taken away`));
      });
      const video = Object.assign(document.createElement("video"), {
        muted: true,
        playsInline: true,
        srcObject: stream,
      });
      this.#video = video;
      await video.play();
    } catch (error) {
      this.close();
      throw deviceError(error, device);
    }
  }

  #ask() {
    const { deviceId } = this.#options;
    if (this.source === "screen")
      return navigator.mediaDevices.getDisplayMedia({ video: { frameRate: 5 }, audio: false });
    const which = deviceId
      ? { deviceId: { exact: deviceId } }
      : { facingMode: this.source === "back" ? "environment" : "user" };
    return navigator.mediaDevices.getUserMedia({
      video: { ...which, width: { ideal: 640 }, height: { ideal: 480 } },
    });
  }

  /** @returns {Promise<Uint8Array | null>} what is seen now, as JPEG; null before the first picture */
  async capture() {
    const video = this.#video;
    if (!video?.videoWidth) return null;
    const scale = Math.min(
      1,
      (this.#options.sideMax ?? SIDE_MAX) / Math.max(video.videoWidth, video.videoHeight),
    );
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(1, Math.round(video.videoWidth * scale));
    canvas.height = Math.max(1, Math.round(video.videoHeight * scale));
    canvas.getContext("2d")?.drawImage(video, 0, 0, canvas.width, canvas.height);
    const quality = this.#options.quality ?? QUALITY;
    const blob = await new Promise((/** @type {BlobCallback} */ resolve) =>
      canvas.toBlob(resolve, "image/jpeg", quality),
    );
    return blob && new Uint8Array(await blob.arrayBuffer());
  }

  /** Let go of the camera; it can be opened again. */
  close() {
    this.#turn += 1;
    for (const track of this.stream?.getTracks() ?? []) track.stop();
    [this.stream, this.#video] = [null, null];
  }
}
