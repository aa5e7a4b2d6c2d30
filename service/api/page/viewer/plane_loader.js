/** Loading of planes at full resolution. If the volume is subsampled, they are fetched once the user stays on a plane. */

import { ACROSS } from "../volumes/slices.js";
import { AXES } from "./scene.js";

/** @typedef {import("./scene.js").Axis} Axis */
/** @typedef {import("./scene.js").Scene} Scene */
/** @typedef {import("./scene.js").FinePlane} FinePlane */

/** Time without a change of the plane after which it is fetched. */
const IDLE_MILLISECONDS = 200;

export class PlaneLoader {
  /** @param {Scene} scene */
  constructor(scene) {
    this.scene = scene;
    /** Fetches a plane at full resolution. @type {((axis: Axis, position: number, signal: AbortSignal) => Promise<FinePlane>) | null} */
    this.fetch = null;
    /** The position of the plane that is being fetched along each axis, -1 for none. */
    this.pending = [-1, -1, -1];
    this.fetching = new AbortController();
    this.timer = 0;
  }

  /** Fetch the planes that the views show subsampled, unless they move to other planes first. */
  request() {
    const { image, labels, position, finePlanes } = this.scene.state;
    if (image === null || this.fetch === null) return;
    const axes = AXES.filter((axis) => {
      const plane = finePlanes[axis];
      const isLoaded = plane?.position === position[axis] && (plane.labels !== null) === (labels !== null);
      const isSubsampled = ACROSS[axis].some((other) => image.step[other] > 1);
      return !isLoaded && this.pending[axis] !== position[axis] && isSubsampled;
    });
    if (axes.length === 0) return;
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.#fetchPlanes(image, axes), IDLE_MILLISECONDS);
  }

  /** @param {import("./scene.js").Volume} image @param {Axis[]} axes */
  async #fetchPlanes(image, axes) {
    const { scene } = this;
    const { signal } = this.fetching;
    await Promise.all(
      axes.map(async (axis) => {
        const position = scene.state.position[axis];
        this.pending[axis] = position;
        const plane = await this.fetch?.(axis, position * image.step[axis], signal).catch(() => null);
        if (this.pending[axis] === position) this.pending[axis] = -1;
        if (!plane || signal.aborted || scene.state.position[axis] !== position) return;
        const finePlanes = /** @type {import("./scene.js").SceneState["finePlanes"]} */ ([...scene.state.finePlanes]);
        finePlanes[axis] = { position, ...plane };
        scene.set({ finePlanes });
      }),
    );
  }

  /** Discard the planes when another volume is displayed. */
  forget() {
    this.fetching.abort();
    this.fetching = new AbortController();
    this.scene.set({ finePlanes: [null, null, null] });
    this.pending = [-1, -1, -1];
  }
}
