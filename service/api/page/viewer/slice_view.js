/** A view of a stack along one axis: a canvas with gray values, one with outlines, a crosshair and a slider. */

import { element } from "../core/elements.js";
import { ACROSS, paintGray, paintLabels, slice } from "../volumes/slices.js";
import { clamp } from "./scene.js";

/** @typedef {import("./scene.js").Axis} Axis */
/** @typedef {import("./scene.js").Volume} Volume */
/** @typedef {import("./scene.js").Plane} Plane */
/** @typedef {import("./scene.js").Triple} Triple */
/** @typedef {import("./scene.js").Scene} Scene */

const NAMES = /** @type {const} */ (["XY", "XZ", "ZY"]);
const LETTERS = ["z", "y", "x"];

export class SliceView {
  /** @param {Axis} axis @param {Scene} scene */
  constructor(axis, scene) {
    this.axis = axis;
    this.scene = scene;
    this.base = element("canvas", { class: "base" });
    this.over = element("canvas", { class: "over" });
    this.horizontal = element("div", { class: "cross horizontal" });
    this.vertical = element("div", { class: "cross vertical" });
    this.caption = element("output", { class: "caption" });
    this.slider = element("input", {
      type: "range",
      min: "0",
      value: "0",
      "aria-label": `Plane along ${LETTERS[axis]}`,
    });
    this.stage = element(
      "div",
      { class: "stage", tabIndex: 0, role: "img" },
      this.base,
      this.over,
      this.horizontal,
      this.vertical,
    );
    this.root = element(
      "div",
      { class: "view", "data-axis": LETTERS[axis] },
      this.stage,
      element("div", { class: "view-foot" }, this.caption, this.slider),
    );
    this.offscreen = document.createElement("canvas");
    /** Size of the stage in CSS pixels. */
    this.width = 0;
    this.height = 0;
    /** Buffer for painting the outlines. @type {ImageData | undefined} */
    this.outlines = undefined;
  }

  /** Match the canvases to the size of the stage and the pixel ratio of the screen. */
  resize() {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    for (const canvas of [this.base, this.over]) {
      canvas.width = Math.max(1, Math.round(this.stage.clientWidth * ratio));
      canvas.height = Math.max(1, Math.round(this.stage.clientHeight * ratio));
    }
    this.ratio = ratio;
    // Reading the size while drawing would force a new layout for every view.
    this.width = this.stage.clientWidth;
    this.height = this.stage.clientHeight;
    this.outlines = undefined;
  }

  /** Return the position of voxel 0 and the size of a voxel in CSS pixels. */
  placement() {
    const { voxel, center, scale } = this.scene.state;
    const [down, right] = ACROSS[this.axis];
    const scaleX = scale * voxel[right];
    const scaleY = scale * voxel[down];
    const left = this.width / 2 - center[right] * scaleX;
    return { left, top: this.height / 2 - center[down] * scaleY, scaleX, scaleY };
  }

  /** @param {number} x @param {number} y pixels of the stage @returns {[number, number]} voxel coordinates down and to the right */
  pointAt(x, y) {
    const placement = this.placement();
    return [(y - placement.top) / placement.scaleY, (x - placement.left) / placement.scaleX];
  }

  /** @param {number} x @param {number} y pixels of the stage @returns {Triple} the nearest voxel of the stack */
  voxelAt(x, y) {
    const { image, position } = this.scene.state;
    const [down, right] = ACROSS[this.axis];
    const [v, u] = this.pointAt(x, y);
    /** @type {Triple} */
    const voxel = [...position];
    if (image === null) return voxel;
    voxel[right] = clamp(Math.floor(u), image.shape[right]);
    voxel[down] = clamp(Math.floor(v), image.shape[down]);
    return voxel;
  }

  draw() {
    const { image, position } = this.scene.state;
    if (image === null || this.width === 0) return;
    const placement = this.placement();
    this.#drawImage(image, placement);
    this.#drawLabels(placement);
    this.moveCrosshair(placement);
    const plane = position[this.axis];
    this.slider.max = String(image.shape[this.axis] - 1);
    this.slider.value = String(plane);
    const step = image.step[this.axis];
    const letter = LETTERS[this.axis];
    this.caption.value = `${NAMES[this.axis]}   ${letter} ${plane * step + 1} / ${image.fullShape[this.axis]}`;
    this.stage.setAttribute(
      "aria-label",
      `${NAMES[this.axis]} view, plane ${plane * step + 1} of ${image.fullShape[this.axis]}`,
    );
  }

  /** @param {Volume} image @param {import("../volumes/slices.js").Placement} placement */
  #drawImage(image, placement) {
    const { position, smooth, overlays } = this.scene.state;
    const context = this.base.getContext("2d");
    if (context === null) return;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.globalCompositeOperation = "source-over";
    context.clearRect(0, 0, this.base.width, this.base.height);
    context.imageSmoothingEnabled = smooth;
    const finePlane = this.#finePlane();
    this.#paint(
      context,
      this.scene.state,
      finePlane?.image ?? slice(image, this.axis, position[this.axis]),
      this.#finePlacement(placement, finePlane?.step),
    );
    context.globalCompositeOperation = "lighter";
    for (const layer of overlays) {
      if (layer.image) this.#paint(context, layer, slice(layer.image, this.axis, position[this.axis]), placement);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {import("./scene.js").Layer} layer
   * @param {Plane} plane @param {import("../volumes/slices.js").Placement} placement
   */
  #paint(context, { contrast, color }, plane, { left, top, scaleX, scaleY }) {
    const ratio = this.ratio ?? 1;
    if (this.offscreen.width !== plane.width) this.offscreen.width = plane.width;
    if (this.offscreen.height !== plane.height) this.offscreen.height = plane.height;
    this.offscreen.getContext("2d")?.putImageData(paintGray(plane, ...contrast, color), 0, 0);
    context.setTransform(scaleX * ratio, 0, 0, scaleY * ratio, left * ratio, top * ratio);
    context.drawImage(this.offscreen, 0, 0);
  }

  /** Return the displayed plane at full resolution, or null if it has not been fetched. */
  #finePlane() {
    const { finePlanes, position } = this.scene.state;
    return finePlanes[this.axis]?.position === position[this.axis] ? finePlanes[this.axis] : null;
  }

  /**
   * Return the placement of a plane with a smaller step than the volume.
   * @param {import("../volumes/slices.js").Placement} placement @param {Triple | undefined} step
   */
  #finePlacement(placement, step) {
    const { image } = this.scene.state;
    if (!step || !image) return placement;
    const [down, right] = ACROSS[this.axis];
    const [scaleX, scaleY] = [step[right] / image.step[right], step[down] / image.step[down]];
    return { ...placement, scaleX: placement.scaleX * scaleX, scaleY: placement.scaleY * scaleY };
  }

  /** @param {import("../volumes/slices.js").Placement} placement */
  #drawLabels(placement) {
    const { labels, position, filled, selected, hidden, colorIndices, opacity, showObjects } = this.scene.state;
    this.over.style.opacity = String(showObjects ? opacity : 0);
    const context = this.over.getContext("2d");
    if (context === null) return;
    if (labels === null || !showObjects) {
      context.clearRect(0, 0, this.over.width, this.over.height);
      return;
    }
    const ratio = this.ratio ?? 1;
    const image = this.outlines ?? context.createImageData(this.over.width, this.over.height);
    this.outlines = image;
    const finePlane = this.#finePlane();
    const plane = finePlane?.labels ?? slice(labels, this.axis, position[this.axis]);
    const fine = this.#finePlacement(placement, finePlane?.labels ? finePlane.step : undefined);
    const pixels = {
      left: fine.left * ratio,
      top: fine.top * ratio,
      scaleX: fine.scaleX * ratio,
      scaleY: fine.scaleY * ratio,
    };
    const thickness = ratio > 1.4 ? 2 : 1;
    paintLabels(plane, image, pixels, { filled, selected, hidden, colorIndices, thickness });
    context.putImageData(image, 0, 0);
  }

  /** Move the crosshair to the planes of the other views. @param {import("../volumes/slices.js").Placement} [placement] */
  moveCrosshair(placement = this.placement()) {
    const { position } = this.scene.state;
    const [down, right] = ACROSS[this.axis];
    this.horizontal.style.transform = `translateY(${placement.top + (position[down] + 0.5) * placement.scaleY}px)`;
    this.vertical.style.transform = `translateX(${placement.left + (position[right] + 0.5) * placement.scaleX}px)`;
  }
}
