/** Planes in full resolution, fetched once the reader stays on them, where the volume here has coarser steps. */

import { ACROSS } from "../volumes/slices.js";
import { AXES } from "./scene.js";

/** @typedef {import("./scene.js").Axis} Axis */
/** @typedef {import("./scene.js").Scene} Scene */
/** @typedef {import("./scene.js").Sharp} Sharp */

const IDLE_MILLISECONDS = 200;

export class SharpPlanes {
  /** @param {Scene} scene */
  constructor(scene) {
    this.scene = scene;
    /** Fetches a plane of the whole stack as it is. @type {((axis: Axis, at: number, signal: AbortSignal) => Promise<Sharp>) | null} */
    this.fetch = null;
    /** By axis the plane that is being fetched. */
    this.awaited = [-1, -1, -1];
    this.fetching = new AbortController();
    this.timer = 0;
  }

  /** Have planes fetched that the views show coarsely, unless they show others soon. */
  request() {
    const { image, labels, at, sharp } = this.scene.state;
    if (image === null || this.fetch === null) return;
    const wanted = AXES.filter((axis) => {
      const here = sharp[axis];
      const done = here?.at === at[axis] && (here.labels !== null) === (labels !== null);
      return !done && this.awaited[axis] !== at[axis] && ACROSS[axis].some((across) => image.step[across] > 1);
    });
    if (wanted.length === 0) return;
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.#fetchPlanes(image, wanted), IDLE_MILLISECONDS);
  }

  /** @param {import("./scene.js").Volume} image @param {Axis[]} axes */
  async #fetchPlanes(image, axes) {
    const { scene } = this;
    const { signal } = this.fetching;
    await Promise.all(
      axes.map(async (axis) => {
        const wanted = scene.state.at[axis];
        this.awaited[axis] = wanted;
        const found = await this.fetch?.(axis, wanted * image.step[axis], signal).catch(() => null);
        if (this.awaited[axis] === wanted) this.awaited[axis] = -1;
        if (!found || signal.aborted || scene.state.at[axis] !== wanted) return;
        const sharp = /** @type {import("./scene.js").SceneState["sharp"]} */ ([...scene.state.sharp]);
        sharp[axis] = { at: wanted, ...found };
        scene.set({ sharp });
      }),
    );
  }

  /** Forget the planes of a volume that is shown no more. */
  forget() {
    this.fetching.abort();
    this.fetching = new AbortController();
    this.scene.set({ sharp: [null, null, null] });
    this.awaited = [-1, -1, -1];
  }
}
