/**
 * Events by name, with their listeners.
 * @template {Record<string, any> | object} Events
 */
export class Emitter<Events extends Record<string, any> | object> {
    /**
     * Listen to one kind of event.
     * @template {keyof Events} Name
     * @param {Name} name
     * @param {(event: Events[Name]) => void} listener
     * @returns {() => void} listens no longer
     */
    on<Name extends keyof Events>(name: Name, listener: (event: Events[Name]) => void): () => void;
    /**
     * Tell the listeners; one that throws is reported to the console, and keeps nothing from the others.
     * @template {keyof Events} Name
     * @param {Name} name
     * @param {Events[Name]} event
     * @protected
     */
    protected emit<Name extends keyof Events>(name: Name, event: Events[Name]): void;
    #private;
}
/** Knows when the user spoke last, by loudness: good enough for a measure on a page, not for a decision. */
export class VoiceClock {
    /** @param {Float32Array} samples a block of the microphone */
    hear(samples: Float32Array): void;
    /** @returns {number | null} milliseconds since the user spoke; null before */
    sinceMs(): number | null;
    #private;
}
