/** One view of a stack along an axis: a canvas with grey values, one with outlines, a crosshair, a slider. */

import { element } from "../core/elements.js";
import { ACROSS, cut, paintGrey, paintLabels } from "../volumes/slices.js";
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
    /** Of the stage, in pixels of the style sheet. */
    this.width = 0;
    this.height = 0;
    /** What the outlines are painted into. @type {ImageData | undefined} */
    this.outlines = undefined;
  }

  /** Give the canvases as many pixels as the screen has there. */
  resize() {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    for (const canvas of [this.base, this.over]) {
      canvas.width = Math.max(1, Math.round(this.stage.clientWidth * ratio));
      canvas.height = Math.max(1, Math.round(this.stage.clientHeight * ratio));
    }
    this.ratio = ratio;
    // Asking the document while drawing would have it laid out anew for every view.
    this.width = this.stage.clientWidth;
    this.height = this.stage.clientHeight;
    this.outlines = undefined;
  }

  /** Where voxel 0 lies and how large a voxel is, in pixels of the style sheet. */
  placement() {
    const { voxel, centre, scale } = this.scene.state;
    const [down, right] = ACROSS[this.axis];
    const scaleX = scale * voxel[right];
    const scaleY = scale * voxel[down];
    const left = this.width / 2 - centre[right] * scaleX;
    return { left, top: this.height / 2 - centre[down] * scaleY, scaleX, scaleY };
  }

  /** @param {number} x @param {number} y of the stage @returns {[number, number]} voxels down and to the right */
  pointAt(x, y) {
    const place = this.placement();
    return [(y - place.top) / place.scaleY, (x - place.left) / place.scaleX];
  }

  /** @param {number} x @param {number} y of the stage @returns {Triple} the voxel there, within the stack */
  voxelAt(x, y) {
    const { image, at } = this.scene.state;
    const [down, right] = ACROSS[this.axis];
    const [v, u] = this.pointAt(x, y);
    /** @type {Triple} */
    const found = [...at];
    if (image === null) return found;
    found[right] = clamp(Math.floor(u), image.shape[right]);
    found[down] = clamp(Math.floor(v), image.shape[down]);
    return found;
  }

  draw() {
    const { image, at } = this.scene.state;
    if (image === null || this.width === 0) return;
    const place = this.placement();
    this.#drawImage(image, place);
    this.#drawLabels(place);
    this.moveCross(place);
    const plane = at[this.axis];
    this.slider.max = String(image.shape[this.axis] - 1);
    this.slider.value = String(plane);
    const step = image.step[this.axis];
    const letter = LETTERS[this.axis];
    this.caption.value = `${NAMES[this.axis]}   ${letter} ${plane * step + 1} / ${image.whole[this.axis]}`;
    this.stage.setAttribute(
      "aria-label",
      `${NAMES[this.axis]} view, plane ${plane * step + 1} of ${image.whole[this.axis]}`,
    );
  }

  /** @param {Volume} image @param {import("../volumes/slices.js").Placement} place */
  #drawImage(image, place) {
    const { at, smooth, overlays } = this.scene.state;
    const context = this.base.getContext("2d");
    if (context === null) return;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.globalCompositeOperation = "source-over";
    context.clearRect(0, 0, this.base.width, this.base.height);
    context.imageSmoothingEnabled = smooth;
    const sharp = this.#sharp();
    this.#paint(
      context,
      this.scene.state,
      sharp?.image ?? cut(image, this.axis, at[this.axis]),
      this.#fine(place, sharp?.step),
    );
    context.globalCompositeOperation = "lighter";
    for (const layer of overlays) {
      if (layer.image) this.#paint(context, layer, cut(layer.image, this.axis, at[this.axis]), place);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context @param {import("./scene.js").Layer} layer
   * @param {Plane} plane @param {import("../volumes/slices.js").Placement} place
   */
  #paint(context, { contrast, colour }, plane, { left, top, scaleX, scaleY }) {
    const ratio = this.ratio ?? 1;
    if (this.offscreen.width !== plane.width) this.offscreen.width = plane.width;
    if (this.offscreen.height !== plane.height) this.offscreen.height = plane.height;
    this.offscreen.getContext("2d")?.putImageData(paintGrey(plane, ...contrast, colour), 0, 0);
    context.setTransform(scaleX * ratio, 0, 0, scaleY * ratio, left * ratio, top * ratio);
    context.drawImage(this.offscreen, 0, 0);
  }

  /** The plane in full resolution, where it has been fetched. */
  #sharp() {
    const { sharp, at } = this.scene.state;
    return sharp[this.axis]?.at === at[this.axis] ? sharp[this.axis] : null;
  }

  /**
   * The placement of a plane with smaller steps than the volume.
   * @param {import("../volumes/slices.js").Placement} place @param {Triple | undefined} step
   */
  #fine(place, step) {
    const { image } = this.scene.state;
    if (!step || !image) return place;
    const [down, right] = ACROSS[this.axis];
    const [scaleX, scaleY] = [step[right] / image.step[right], step[down] / image.step[down]];
    return { ...place, scaleX: place.scaleX * scaleX, scaleY: place.scaleY * scaleY };
  }

  /** @param {import("../volumes/slices.js").Placement} place */
  #drawLabels(place) {
    const { labels, at, filled, selected, hidden, entries, opacity, shown } = this.scene.state;
    this.over.style.opacity = String(shown ? opacity : 0);
    const context = this.over.getContext("2d");
    if (context === null) return;
    if (labels === null || !shown) {
      context.clearRect(0, 0, this.over.width, this.over.height);
      return;
    }
    const ratio = this.ratio ?? 1;
    const image = this.outlines ?? context.createImageData(this.over.width, this.over.height);
    this.outlines = image;
    const sharp = this.#sharp();
    const plane = sharp?.labels ?? cut(labels, this.axis, at[this.axis]);
    const fine = this.#fine(place, sharp?.labels ? sharp.step : undefined);
    const pixels = {
      left: fine.left * ratio,
      top: fine.top * ratio,
      scaleX: fine.scaleX * ratio,
      scaleY: fine.scaleY * ratio,
    };
    const thickness = ratio > 1.4 ? 2 : 1;
    paintLabels(plane, image, pixels, { filled, selected, hidden, entries, thickness });
    context.putImageData(image, 0, 0);
  }

  /** Show where the other views are cut. @param {import("../volumes/slices.js").Placement} [place] */
  moveCross(place = this.placement()) {
    const { at } = this.scene.state;
    const [down, right] = ACROSS[this.axis];
    this.horizontal.style.transform = `translateY(${place.top + (at[down] + 0.5) * place.scaleY}px)`;
    this.vertical.style.transform = `translateX(${place.left + (at[right] + 0.5) * place.scaleX}px)`;
  }
}
