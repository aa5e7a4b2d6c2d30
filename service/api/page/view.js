/** One view of a stack along an axis: a canvas with grey values, one with outlines, a crosshair, a slider. */

import { element } from "./elements.js";
import { ACROSS, cut, paintGrey, paintLabels } from "./slices.js";

/** @typedef {import("./slices.js").Axis} Axis */
/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./slices.js").Plane} Plane */
/** @typedef {import("./planes.js").Triple} Triple */

/**
 * @typedef {object} Scene what all views of a stack show
 * @property {Volume | null} image
 * @property {Volume | null} labels
 * @property {{at: number, image: Plane, labels: Plane | null} | null} sharp the plane along z in full resolution
 * @property {Triple} voxel edges of a voxel of what is here, in micrometres
 * @property {Triple} at the voxel under the crosshair
 * @property {Triple} centre voxel in the middle of the views
 * @property {number} scale pixels of the screen for a micrometre
 * @property {[number, number]} contrast grey values that are black and white
 * @property {boolean} smooth
 * @property {boolean} shown whether objects are shown
 * @property {boolean} filled
 * @property {number} opacity of the objects
 * @property {number} selected id of the selected object, 0: none
 * @property {Uint8Array | null} hidden for each id whether it is hidden
 */

export const NAMES = /** @type {const} */ (["XY", "XZ", "ZY"]);
const LETTERS = ["z", "y", "x"];

export class View {
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
    this.painted = "";
  }

  /** Give the canvases as many pixels as the screen has there. */
  resize() {
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    for (const canvas of [this.base, this.over]) {
      canvas.width = Math.max(1, Math.round(this.stage.clientWidth * ratio));
      canvas.height = Math.max(1, Math.round(this.stage.clientHeight * ratio));
    }
    this.ratio = ratio;
  }

  /** Where voxel 0 lies and how large a voxel is, in pixels of the style sheet. */
  placement() {
    const { voxel, centre, scale } = this.scene;
    const [down, right] = ACROSS[this.axis];
    const scaleX = scale * voxel[right];
    const scaleY = scale * voxel[down];
    const left = this.stage.clientWidth / 2 - centre[right] * scaleX;
    return { left, top: this.stage.clientHeight / 2 - centre[down] * scaleY, scaleX, scaleY };
  }

  /** @param {number} x @param {number} y of the stage @returns {Triple} the voxel there, within the stack */
  voxelAt(x, y) {
    const { image, at } = this.scene;
    const place = this.placement();
    const [down, right] = ACROSS[this.axis];
    /** @type {Triple} */
    const found = [...at];
    if (image === null) return found;
    found[right] = clamp(Math.floor((x - place.left) / place.scaleX), image.shape[right]);
    found[down] = clamp(Math.floor((y - place.top) / place.scaleY), image.shape[down]);
    return found;
  }

  draw() {
    const { image, at } = this.scene;
    if (image === null || this.stage.clientWidth === 0) return;
    const place = this.placement();
    this.#drawImage(image, place);
    this.#drawLabels(place);
    this.#moveCross(place);
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

  /** @param {Volume} image @param {import("./slices.js").Placement} place */
  #drawImage(image, place) {
    const { contrast, at, smooth } = this.scene;
    const sharp = this.#sharp()?.image;
    const plane = sharp ?? cut(image, this.axis, at[this.axis]);
    const finer = sharp ? fineness(sharp, image) : 1;
    const ratio = this.ratio ?? 1;
    this.offscreen.width = plane.width;
    this.offscreen.height = plane.height;
    this.offscreen.getContext("2d")?.putImageData(paintGrey(plane, ...contrast), 0, 0);
    const context = this.base.getContext("2d");
    if (context === null) return;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.base.width, this.base.height);
    context.imageSmoothingEnabled = smooth;
    const { left, top, scaleX, scaleY } = place;
    context.setTransform(scaleX * finer * ratio, 0, 0, scaleY * finer * ratio, left * ratio, top * ratio);
    context.drawImage(this.offscreen, 0, 0);
  }

  /** The plane in full resolution, where it has been fetched. */
  #sharp() {
    const { sharp, at } = this.scene;
    return this.axis === 0 && sharp?.at === at[0] ? sharp : null;
  }

  /** @param {import("./slices.js").Placement} place */
  #drawLabels(place) {
    const { labels, at, filled, selected, hidden, opacity, shown } = this.scene;
    this.over.style.opacity = String(shown ? opacity : 0);
    const context = this.over.getContext("2d");
    if (context === null) return;
    if (labels === null || !shown) {
      context.clearRect(0, 0, this.over.width, this.over.height);
      return;
    }
    const ratio = this.ratio ?? 1;
    const image = context.createImageData(this.over.width, this.over.height);
    const sharp = this.#sharp()?.labels;
    const plane = sharp ?? cut(labels, this.axis, at[this.axis]);
    const finer = (sharp ? fineness(sharp, labels) : 1) * ratio;
    const pixels = {
      left: place.left * ratio,
      top: place.top * ratio,
      scaleX: place.scaleX * finer,
      scaleY: place.scaleY * finer,
    };
    const thickness = ratio > 1.4 ? 2 : 1;
    paintLabels(plane, image, pixels, { filled, selected, hidden, thickness });
    context.putImageData(image, 0, 0);
  }

  /** @param {import("./slices.js").Placement} [place] */
  #moveCross(place = this.placement()) {
    const { at } = this.scene;
    const [down, right] = ACROSS[this.axis];
    this.horizontal.style.transform = `translateY(${place.top + (at[down] + 0.5) * place.scaleY}px)`;
    this.vertical.style.transform = `translateX(${place.left + (at[right] + 0.5) * place.scaleX}px)`;
  }

  /** Show where the other views are cut, without painting anew. */
  moveCross() {
    this.#moveCross();
  }
}

/** The edge of a pixel of a plane in voxels of a coarser volume. @param {Plane} plane @param {Volume} volume */
function fineness(plane, volume) {
  return Math.ceil(volume.whole[2] / plane.width) / volume.step[2];
}

/** @param {number} value @param {number} length */
export function clamp(value, length) {
  return Math.max(0, Math.min(length - 1, value));
}
