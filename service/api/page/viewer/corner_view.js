/** The corner beside the three slices: the maximum projection along z, or the stack in three dimensions. */

import { button, element } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { paintGrey, project } from "../volumes/slices.js";

/** @typedef {import("./scene.js").Scene} Scene */

export class CornerView {
  /**
   * @param {Scene} scene @param {(y: number, x: number) => void} onpick place in the projection, as shares of its edges
   * @param {(large: boolean) => void} onenlarge
   */
  constructor(scene, onpick, onenlarge) {
    this.scene = scene;
    this.onenlarge = onenlarge;
    this.large = false;
    /** @type {{volume: import("./scene.js").Volume, plane: import("./scene.js").Plane} | undefined} */
    this.projected = undefined;
    /** Whether the projection has to be drawn again. */
    this.stale = true;
    this.projection = element("canvas", {
      class: "projection",
      role: "img",
      "aria-label": "Maximum projection along z",
      onclick: (/** @type {MouseEvent} */ event) => {
        const { left, top, width, height } = this.projection.getBoundingClientRect();
        onpick((event.clientY - top) / height, (event.clientX - left) / width);
      },
    });
    this.solidCanvas = element("canvas", {
      class: "solid",
      hidden: true,
      tabIndex: 0,
      role: "img",
      "aria-label": "The stack in three dimensions; arrows turn it",
    });
    /** @type {import("./solid.js").Solid | null} */
    this.solid = null;
    this.maximum = button("Maximum", () => this.showSolid(false), "quiet toggle");
    this.turned = button("3D", () => this.showSolid(true), "quiet toggle");
    this.larger = button("Enlarge", () => this.#enlarge(), "quiet toggle");
    this.stage = element("div", { class: "stage still" }, this.projection, this.solidCanvas);
    this.root = element(
      "div",
      { class: "view corner" },
      this.stage,
      element("div", { class: "view-foot" }, this.maximum, this.turned, this.larger),
    );
    this.root.addEventListener("keydown", ({ key }) => {
      if (key === "Escape" && this.large) this.#enlarge();
    });
    scene.subscribe((before) => {
      this.stale ||= hasChanged(before, scene.state, ["image", "contrast", "voxel"]);
    });
    this.#describe();
  }

  /** @param {boolean} shown whether the corner has the solid instead of the maximum projection */
  async showSolid(shown) {
    if (shown && this.solid === null) {
      const { Solid } = await import("./solid.js");
      this.solid = new Solid(this.solidCanvas, this.scene);
      this.turned.disabled = !this.solid.usable;
      this.turned.title = this.solid.usable ? "" : "This browser has no WebGL2.";
    }
    const usable = shown && this.solid?.usable === true;
    this.solidCanvas.hidden = !usable;
    this.projection.hidden = usable;
    this.#describe();
    this.draw();
  }

  #enlarge() {
    this.large = !this.large;
    this.#describe();
    this.onenlarge(this.large);
  }

  #describe() {
    for (const [toggle, on] of /** @type {[HTMLElement, boolean][]} */ ([
      [this.maximum, this.solidCanvas.hidden],
      [this.turned, !this.solidCanvas.hidden],
      [this.larger, this.large],
    ]))
      toggle.setAttribute("aria-pressed", String(on));
  }

  draw() {
    if (this.stale) this.#drawProjection();
    if (!this.solidCanvas.hidden) this.solid?.draw();
  }

  /** Make the solid again from voxels that have changed. */
  refreshSolid() {
    if (this.solid === null) return;
    this.solid.held = [];
    this.draw();
  }

  /** Make the projection again, as more planes have come. */
  refreshProjection() {
    this.projected = undefined;
    this.stale = true;
  }

  /** Fit the projection into the corner, which has another size. */
  resize() {
    this.stale = true;
  }

  #drawProjection() {
    const { image, contrast, voxel } = this.scene.state;
    if (image === null) return;
    this.stale = false;
    if (this.projected?.volume !== image) this.projected = { volume: image, plane: project(image) };
    const { plane } = this.projected;
    this.projection.width = plane.width;
    this.projection.height = plane.height;
    this.projection.getContext("2d")?.putImageData(paintGrey(plane, ...contrast), 0, 0);
    const [width, height] = [plane.width * voxel[2], plane.height * voxel[1]];
    const scale = Math.min(this.stage.clientWidth / width, this.stage.clientHeight / height) * 0.94;
    this.projection.style.width = `${width * scale}px`;
    this.projection.style.height = `${height * scale}px`;
  }
}
