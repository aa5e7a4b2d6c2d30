/** Corner next to the three slices. It shows the maximum projection along z or a 3D rendering. */

import { button, element } from "../core/elements.js";
import { hasChanged } from "../core/store.js";
import { paintGray, projectMaximum } from "../volumes/slices.js";

/** @typedef {import("./scene.js").Scene} Scene */

/** The projection, the 3D rendering, and the buttons that switch between them. */
export class CornerView {
  /**
   * @param {Scene} scene @param {(y: number, x: number) => void} onpick called with the clicked position as fractions of the size of the projection
   * @param {(isEnlarged: boolean) => void} onenlarge called when the corner is enlarged or reduced
   */
  constructor(scene, onpick, onenlarge) {
    this.scene = scene;
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
    this.canvas3d = element("canvas", {
      class: "rendering",
      hidden: true,
      tabIndex: 0,
      role: "img",
      "aria-label": "3D view of the stack. Use the arrow keys to rotate it.",
    });
    /** @type {import("./volume_renderer.js").VolumeRenderer | null} */
    this.renderer = null;
    this.projectionToggle = button("Maximum", () => this.set3dVisible(false), "quiet toggle");
    this.renderingToggle = button("3D", () => this.set3dVisible(true), "quiet toggle");
    this.enlargeToggle = button("Enlarge", () => this.#toggleEnlarged(), "quiet toggle");
    this.stage = element("div", { class: "stage centered" }, this.projectionCanvas, this.canvas3d);
    this.root = element(
      "div",
      { class: "view corner" },
      this.stage,
      element("div", { class: "view-foot" }, this.projectionToggle, this.renderingToggle, this.enlargeToggle),
    );
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
    if (isVisible && this.renderer === null) {
      const { VolumeRenderer } = await import("./volume_renderer.js");
      this.renderer = new VolumeRenderer(this.canvas3d, this.scene);
      this.renderingToggle.disabled = !this.renderer.isSupported;
      this.renderingToggle.title = this.renderer.isSupported ? "" : "The 3D view requires a browser with WebGL 2.";
    }
    const canShow = isVisible && this.renderer?.isSupported === true;
    this.canvas3d.hidden = !canShow;
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
      [this.projectionToggle, this.canvas3d.hidden],
      [this.renderingToggle, !this.canvas3d.hidden],
      [this.enlargeToggle, this.isEnlarged],
    ]))
      toggle.setAttribute("aria-pressed", String(isPressed));
  }

  draw() {
    if (this.isProjectionStale) this.#drawProjection();
    if (!this.canvas3d.hidden) this.renderer?.draw();
  }

  /** Update the 3D rendering after voxels have been changed in place. */
  refresh3d() {
    if (this.renderer === null) return;
    this.renderer.textureInputs = [];
    this.draw();
  }

  /** Recompute the projection after more planes have been fetched. */
  refreshProjection() {
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
