/** View of a stack along one axis, with a canvas for gray values, a canvas for outlines, a crosshair and a slider. */

import { element } from "../core/elements.js";
import { extractPlane, IN_PLANE_AXES, PLANE_NAMES, paintGray, paintLabels } from "../volumes/slices.js";
import { clamp } from "./scene.js";

/** @typedef {import("./scene.js").Axis} Axis */
/** @typedef {import("./scene.js").Volume} Volume */
/** @typedef {import("./scene.js").Plane} Plane */
/** @typedef {import("./scene.js").Triple} Triple */
/** @typedef {import("./scene.js").Scene} Scene */

const AXIS_LETTERS = ["z", "y", "x"];

/** The canvases and controls of one view. */
export class SliceView {
  /** @param {Axis} axis @param {Scene} scene */
  constructor(axis, scene) {
    this.axis = axis;
    this.scene = scene;
    this.imageCanvas = element("canvas", { class: "base" });
    this.labelsCanvas = element("canvas", { class: "overlay" });
    this.horizontalLine = element("div", { class: "crosshair horizontal" });
    this.verticalLine = element("div", { class: "crosshair vertical" });
    this.caption = element("output", { class: "caption" });
    this.slider = element("input", {
      type: "range",
      min: "0",
      value: "0",
      "aria-label": `Plane along ${AXIS_LETTERS[axis]}`,
    });
    this.stage = element(
      "div",
      { class: "stage", tabIndex: 0, role: "img" },
      this.imageCanvas,
      this.labelsCanvas,
      this.horizontalLine,
      this.verticalLine,
    );
    this.root = element(
      "div",
      { class: "view", "data-axis": AXIS_LETTERS[axis] },
      this.stage,
      element("div", { class: "view-foot" }, this.caption, this.slider),
    );
    this.planeCanvas = document.createElement("canvas");
    /** Width and height of the stage in CSS pixels. */
    this.width = 0;
    this.height = 0;
    /** Reused buffer in which the outlines are painted. @type {ImageData | undefined} */
    this.outlinesImage = undefined;
  }

  /** Match the canvases to the size of the stage and the pixel ratio of the screen. */
  resize() {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    for (const canvas of [this.imageCanvas, this.labelsCanvas]) {
      canvas.width = Math.max(1, Math.round(this.stage.clientWidth * ratio));
      canvas.height = Math.max(1, Math.round(this.stage.clientHeight * ratio));
    }
    this.pixelRatio = ratio;
    // Save the size, because reading it while drawing would force a new layout for every view.
    this.width = this.stage.clientWidth;
    this.height = this.stage.clientHeight;
    this.outlinesImage = undefined;
  }

  /** Return the position of voxel 0 and the size of a voxel in CSS pixels. */
  getPlacement() {
    const { voxelSize, center, scale } = this.scene.state;
    const [downAxis, rightAxis] = IN_PLANE_AXES[this.axis];
    const scaleX = scale * voxelSize[rightAxis];
    const scaleY = scale * voxelSize[downAxis];
    const left = this.width / 2 - center[rightAxis] * scaleX;
    return { left, top: this.height / 2 - center[downAxis] * scaleY, scaleX, scaleY };
  }

  /** @param {number} x @param {number} y position on the stage in pixels @returns {[number, number]} vertical and horizontal coordinates in voxels */
  pointAt(x, y) {
    const placement = this.getPlacement();
    return [(y - placement.top) / placement.scaleY, (x - placement.left) / placement.scaleX];
  }

  /** @param {number} x @param {number} y position on the stage in pixels @returns {Triple} the nearest voxel of the stack */
  voxelAt(x, y) {
    const { image, position } = this.scene.state;
    const [downAxis, rightAxis] = IN_PLANE_AXES[this.axis];
    const [v, u] = this.pointAt(x, y);
    /** @type {Triple} */
    const voxel = [...position];
    if (image === null) return voxel;
    voxel[rightAxis] = clamp(Math.floor(u), image.shape[rightAxis]);
    voxel[downAxis] = clamp(Math.floor(v), image.shape[downAxis]);
    return voxel;
  }

  draw() {
    const { image, position } = this.scene.state;
    if (image === null || this.width === 0) return;
    const placement = this.getPlacement();
    this.#drawImage(image, placement);
    this.#drawLabels(placement);
    this.moveCrosshair(placement);
    const planeIndex = position[this.axis];
    this.slider.max = String(image.shape[this.axis] - 1);
    this.slider.value = String(planeIndex);
    const step = image.step[this.axis];
    const letter = AXIS_LETTERS[this.axis];
    this.caption.value = `${PLANE_NAMES[this.axis]}   ${letter} ${planeIndex * step + 1} / ${image.fullShape[this.axis]}`;
    this.stage.setAttribute(
      "aria-label",
      `${PLANE_NAMES[this.axis]} view, plane ${planeIndex * step + 1} of ${image.fullShape[this.axis]}`,
    );
  }

  /** @param {Volume} image @param {import("../volumes/slices.js").Placement} placement */
  #drawImage(image, placement) {
    const { position, isSmooth, overlays } = this.scene.state;
    const context = this.imageCanvas.getContext("2d");
    if (context === null) return;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.globalCompositeOperation = "source-over";
    context.clearRect(0, 0, this.imageCanvas.width, this.imageCanvas.height);
    context.imageSmoothingEnabled = isSmooth;
    const finePlane = this.#getFinePlane();
    this.#paintPlane(
      context,
      this.scene.state,
      finePlane?.image ?? extractPlane(image, this.axis, position[this.axis]),
      this.#getFinePlacement(placement, finePlane?.step),
    );
    context.globalCompositeOperation = "lighter";
    for (const layer of overlays) {
      if (layer.image)
        this.#paintPlane(context, layer, extractPlane(layer.image, this.axis, position[this.axis]), placement);
    }
  }

  /**
   * Paint the plane of a layer.
   * @param {CanvasRenderingContext2D} context @param {import("./scene.js").Layer} layer
   * @param {Plane} plane @param {import("../volumes/slices.js").Placement} placement
   */
  #paintPlane(context, { contrast, color }, plane, { left, top, scaleX, scaleY }) {
    const ratio = this.pixelRatio ?? 1;
    if (this.planeCanvas.width !== plane.width) this.planeCanvas.width = plane.width;
    if (this.planeCanvas.height !== plane.height) this.planeCanvas.height = plane.height;
    this.planeCanvas.getContext("2d")?.putImageData(paintGray(plane, ...contrast, color), 0, 0);
    context.setTransform(scaleX * ratio, 0, 0, scaleY * ratio, left * ratio, top * ratio);
    context.drawImage(this.planeCanvas, 0, 0);
  }

  /** Return the displayed plane at full resolution, or null if the plane has not been fetched. */
  #getFinePlane() {
    const { finePlanes, position } = this.scene.state;
    return finePlanes[this.axis]?.position === position[this.axis] ? finePlanes[this.axis] : null;
  }

  /**
   * Convert the placement of the volume to the placement of a plane with a smaller sampling step.
   * @param {import("../volumes/slices.js").Placement} placement @param {Triple | undefined} step
   */
  #getFinePlacement(placement, step) {
    const { image } = this.scene.state;
    if (!step || !image) return placement;
    const [downAxis, rightAxis] = IN_PLANE_AXES[this.axis];
    const [scaleX, scaleY] = [step[rightAxis] / image.step[rightAxis], step[downAxis] / image.step[downAxis]];
    return { ...placement, scaleX: placement.scaleX * scaleX, scaleY: placement.scaleY * scaleY };
  }

  /** @param {import("../volumes/slices.js").Placement} placement */
  #drawLabels(placement) {
    const { labels, position, fillObjects, selectedId, hiddenFlags, colorIndices, opacity, showObjects } =
      this.scene.state;
    this.labelsCanvas.style.opacity = String(showObjects ? opacity : 0);
    const context = this.labelsCanvas.getContext("2d");
    if (context === null) return;
    if (labels === null || !showObjects) {
      context.clearRect(0, 0, this.labelsCanvas.width, this.labelsCanvas.height);
      return;
    }
    const ratio = this.pixelRatio ?? 1;
    const image = this.outlinesImage ?? context.createImageData(this.labelsCanvas.width, this.labelsCanvas.height);
    this.outlinesImage = image;
    const finePlane = this.#getFinePlane();
    const plane = finePlane?.labels ?? extractPlane(labels, this.axis, position[this.axis]);
    const finePlacement = this.#getFinePlacement(placement, finePlane?.labels ? finePlane.step : undefined);
    const pixelPlacement = {
      left: finePlacement.left * ratio,
      top: finePlacement.top * ratio,
      scaleX: finePlacement.scaleX * ratio,
      scaleY: finePlacement.scaleY * ratio,
    };
    const thickness = ratio > 1.4 ? 2 : 1;
    paintLabels(plane, image, pixelPlacement, { fillObjects, selectedId, hiddenFlags, colorIndices, thickness });
    context.putImageData(image, 0, 0);
  }

  /** Move the crosshair to the planes that the other views show. @param {import("../volumes/slices.js").Placement} [placement] */
  moveCrosshair(placement = this.getPlacement()) {
    const { position } = this.scene.state;
    const [downAxis, rightAxis] = IN_PLANE_AXES[this.axis];
    this.horizontalLine.style.transform = `translateY(${placement.top + (position[downAxis] + 0.5) * placement.scaleY}px)`;
    this.verticalLine.style.transform = `translateX(${placement.left + (position[rightAxis] + 0.5) * placement.scaleX}px)`;
  }
}
