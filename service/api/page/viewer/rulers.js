/** Lengths over the XY view: the scale bar, and a circle as wide as the objects that are looked for. */

import { element } from "../core/elements.js";
import { number } from "../core/format.js";
import { hasChanged } from "../core/store.js";

/** @typedef {import("./scene.js").Scene} Scene */

const BAR_PIXELS = 90;

export class ScaleBar {
  /** @param {Scene} scene */
  constructor(scene) {
    this.words = element("span");
    this.root = element("div", { class: "scale-bar" }, this.words);
    scene.subscribe((before) => {
      if (hasChanged(before, scene.state, ["scale", "known", "voxel"])) this.#show(scene.state);
    });
  }

  /** Show the longest of 1, 2, 5, 10, ... that is not longer than the bar may be. @param {import("./scene.js").SceneState} state */
  #show({ scale, known, voxel }) {
    const pixel = known ? 1 : 1 / voxel[2];
    const longest = BAR_PIXELS / (scale * pixel);
    const power = 10 ** Math.floor(Math.log10(longest));
    const length = [5, 2, 1].map((digit) => digit * power).find((candidate) => candidate <= longest) ?? power;
    this.root.style.width = `${length * scale * pixel}px`;
    this.words.textContent = `${number(length)} ${known ? "µm" : "px"}`;
  }
}

export class DiameterCircle {
  /** @param {Scene} scene @param {HTMLElement} stage in whose middle it is @param {(pixels: number) => void} onchange voxels of the whole stack, as dragged */
  constructor(scene, stage, onchange) {
    this.scene = scene;
    this.root = element("div", { class: "circle", hidden: true });
    /** In voxels of the whole stack, null: there is none. @type {number | null} */
    this.diameter = null;
    this.root.addEventListener("pointerdown", (event) => {
      event.stopPropagation();
      this.root.setPointerCapture(event.pointerId);
    });
    this.root.addEventListener("pointermove", (event) => {
      if (!this.root.hasPointerCapture(event.pointerId)) return;
      event.stopPropagation();
      const { left, top, width, height } = stage.getBoundingClientRect();
      const distance = Math.hypot(event.clientX - left - width / 2, event.clientY - top - height / 2);
      const pixels = (2 * distance) / this.#pixelsOfVoxel();
      const diameter = Math.max(2, Math.round(pixels * 2) / 2);
      this.show(diameter);
      onchange(diameter);
    });
    scene.subscribe((before) => {
      if (hasChanged(before, scene.state, ["image", "scale", "voxel"])) this.#place();
    });
  }

  /** @param {number | null} diameter in voxels of the whole stack */
  show(diameter) {
    this.diameter = diameter;
    this.#place();
  }

  #pixelsOfVoxel() {
    const { image, scale, voxel } = this.scene.state;
    return (scale * voxel[2]) / (image?.step[2] ?? 1);
  }

  #place() {
    this.root.hidden = !this.diameter || this.scene.state.image === null;
    if (this.diameter && !this.root.hidden)
      this.root.style.width = this.root.style.height = `${this.diameter * this.#pixelsOfVoxel()}px`;
  }
}
