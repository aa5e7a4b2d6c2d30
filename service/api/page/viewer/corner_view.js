/** Corner next to the three slices. It shows the maximum projection along z or a 3D rendering. */

import { button, element } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { paintGray, projectMaximum } from "../volumes/slices.js";

/** @typedef {import("./scene.js").Scene} Scene */

/** The projection, the 3D rendering, and the buttons that switch between them. */
export class CornerView {
  /**
   * @param {Scene} scene @param {(y: number, x: number) => void} onpick called with the clicked position as fractions of the size of the projection
   * @param {(position: import("./scene.js").Triple) => void} onpick3d called with the voxel that the user clicked in the 3D rendering
   * @param {(isEnlarged: boolean) => void} onenlarge called when the corner is enlarged or reduced
   */
  constructor(scene, onpick, onpick3d, onenlarge) {
    this.scene = scene;
    this.onpick3d = onpick3d;
    this.onenlarge = onenlarge;
    this.isEnlarged = false;
    /** @type {{volume: import("./scene.js").Volume, plane: import("./scene.js").Plane} | undefined} */
    this.projectionCache = undefined;
    /** Whether the drawn projection is out of date. */
    this.isProjectionStale = true;
    this.projectionCanvas = element("canvas", {
      class: "projection",
      role: "img",
      "aria-label": "Maximum projection along z",
      onclick: (/** @type {MouseEvent} */ event) => {
        const { left, top, width, height } = this.projectionCanvas.getBoundingClientRect();
        onpick((event.clientY - top) / height, (event.clientX - left) / width);
      },
    });
    /** @type {import("./rendering_view.js").RenderingView | null} */
    this.rendering = null;
    this.projectionToggle = button("Maximum", () => this.set3dVisible(false), "quiet toggle");
    this.renderingToggle = button("3D", () => this.set3dVisible(true), "quiet toggle");
    this.enlargeToggle = button("Enlarge", () => this.#toggleEnlarged(), "quiet toggle");
    this.stage = element("div", { class: "stage centered" }, this.projectionCanvas);
    this.foot = element("div", { class: "view-foot" }, this.projectionToggle, this.renderingToggle, this.enlargeToggle);
    this.root = element("div", { class: "view corner" }, this.stage, this.foot);
    this.root.addEventListener("keydown", ({ key }) => {
      if (key === "Escape" && this.isEnlarged) this.#toggleEnlarged();
    });
    scene.subscribe((previousState) => {
      this.isProjectionStale ||= hasChanged(previousState, scene.state, ["image", "contrast", "voxelSize"]);
    });
    this.#updateToggles();
  }

  /** Switch between the 3D rendering and the maximum projection. @param {boolean} isVisible whether to show the 3D rendering */
  async set3dVisible(isVisible) {
    if (isVisible && this.rendering === null) {
      const { RenderingView } = await import("./rendering_view.js");
      this.rendering = new RenderingView(this.scene, this.onpick3d);
      this.renderingToggle.disabled = !this.rendering.isSupported;
      this.renderingToggle.title = this.rendering.isSupported ? "" : "The 3D view requires a browser with WebGL 2.";
      this.stage.append(this.rendering.stage);
      this.foot.append(this.rendering.tools);
    }
    const { rendering } = this;
    const canShow = isVisible && rendering?.isSupported === true;
    if (rendering) rendering.stage.hidden = rendering.tools.hidden = !canShow;
    this.projectionCanvas.hidden = canShow;
    this.#updateToggles();
    this.draw();
  }

  #toggleEnlarged() {
    this.isEnlarged = !this.isEnlarged;
    this.#updateToggles();
    this.onenlarge(this.isEnlarged);
  }

  #updateToggles() {
    for (const [toggle, isPressed] of /** @type {[HTMLElement, boolean][]} */ ([
      [this.projectionToggle, !this.projectionCanvas.hidden],
      [this.renderingToggle, this.projectionCanvas.hidden],
      [this.enlargeToggle, this.isEnlarged],
    ]))
      toggle.setAttribute("aria-pressed", String(isPressed));
  }

  draw() {
    if (this.isProjectionStale) this.#drawProjection();
    if (this.projectionCanvas.hidden) this.rendering?.draw();
  }

  /** Update the 3D rendering after voxels have been changed in place. */
  refresh3d() {
    if (this.rendering === null) return;
    this.rendering.renderer.invalidate();
    this.draw();
  }

  /** Update the projection and the 3D rendering after more planes have been fetched. */
  refreshProjection() {
    this.rendering?.renderer.invalidate();
    this.projectionCache = undefined;
    this.isProjectionStale = true;
  }

  /** Draw the projection again in the next frame, because its size or its contrast has changed. */
  invalidateProjection() {
    this.isProjectionStale = true;
  }

  #drawProjection() {
    const { image, contrast, voxelSize } = this.scene.state;
    if (image === null) return;
    this.isProjectionStale = false;
    if (this.projectionCache?.volume !== image) this.projectionCache = { volume: image, plane: projectMaximum(image) };
    const { plane } = this.projectionCache;
    this.projectionCanvas.width = plane.width;
    this.projectionCanvas.height = plane.height;
    this.projectionCanvas.getContext("2d")?.putImageData(paintGray(plane, ...contrast), 0, 0);
    const [width, height] = [plane.width * voxelSize[2], plane.height * voxelSize[1]];
    const scale = Math.min(this.stage.clientWidth / width, this.stage.clientHeight / height) * 0.94;
    this.projectionCanvas.style.width = `${width * scale}px`;
    this.projectionCanvas.style.height = `${height * scale}px`;
  }
}
