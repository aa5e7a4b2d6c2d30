/** Loader that fetches planes at full resolution if the volume is subsampled and the user stays on a plane. */

import { IN_PLANE_AXES } from "../volumes/slices.js";
import { AXES } from "./scene.js";

/** @typedef {import("./scene.js").Axis} Axis */
/** @typedef {import("./scene.js").Scene} Scene */
/** @typedef {import("./scene.js").FinePlane} FinePlane */

/** How long the user has to stay on a plane before the plane is fetched at full resolution. */
const FETCH_DELAY_MILLISECONDS = 200;

/** Loader of the planes that the three views show at full resolution. */
export class PlaneLoader {
  /** @param {Scene} scene */
  constructor(scene) {
    this.scene = scene;
    /** Function that fetches a plane at full resolution. @type {((axis: Axis, position: number, signal: AbortSignal) => Promise<FinePlane>) | null} */
    this.fetchPlane = null;
    /** For each axis, the index of the plane that is being fetched, -1 for none. */
    this.pendingPositions = [-1, -1, -1];
    this.fetchAbort = new AbortController();
    this.fetchTimer = 0;
  }

  /** Schedule fetching the planes that the views show subsampled. Fetching starts once the views have not moved for `FETCH_DELAY_MILLISECONDS`. */
  scheduleFetch() {
    const { image, labels, position, finePlanes } = this.scene.state;
    if (image === null || this.fetchPlane === null) return;
    const axes = AXES.filter((axis) => {
      const plane = finePlanes[axis];
      const isLoaded = plane?.position === position[axis] && (plane.labels !== null) === (labels !== null);
      const isSubsampled = IN_PLANE_AXES[axis].some((inPlaneAxis) => image.step[inPlaneAxis] > 1);
      return !isLoaded && this.pendingPositions[axis] !== position[axis] && isSubsampled;
    });
    if (axes.length === 0) return;
    clearTimeout(this.fetchTimer);
    this.fetchTimer = window.setTimeout(() => this.#fetchPlanes(image, axes), FETCH_DELAY_MILLISECONDS);
  }

  /** @param {import("./scene.js").Volume} image @param {Axis[]} axes */
  async #fetchPlanes(image, axes) {
    const { scene } = this;
    const { signal } = this.fetchAbort;
    await Promise.all(
      axes.map(async (axis) => {
        const position = scene.state.position[axis];
        this.pendingPositions[axis] = position;
        const plane = await this.fetchPlane?.(axis, position * image.step[axis], signal).catch(() => null);
        if (this.pendingPositions[axis] === position) this.pendingPositions[axis] = -1;
        if (!plane || signal.aborted || scene.state.position[axis] !== position) return;
        const finePlanes = /** @type {import("./scene.js").SceneState["finePlanes"]} */ ([...scene.state.finePlanes]);
        finePlanes[axis] = { position, ...plane };
        scene.set({ finePlanes });
      }),
    );
  }

  /** Discard all fetched planes, because another volume is displayed. */
  discardPlanes() {
    this.fetchAbort.abort();
    this.fetchAbort = new AbortController();
    this.scene.set({ finePlanes: [null, null, null] });
    this.pendingPositions = [-1, -1, -1];
  }
}
