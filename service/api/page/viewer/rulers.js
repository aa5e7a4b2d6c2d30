/** Rulers in the XY view: the scale bar, and a circle that shows the object diameter. */

import { element } from "../core/elements.js";
import { formatNumber } from "../core/format.js";
import { hasChanged } from "../core/store.js";

/** @typedef {import("./scene.js").Scene} Scene */

const MAX_SCALE_BAR_PIXELS = 90;

/** Return the longest scale bar that fits, with a length from the sequence 1, 2, 5, 10, and so on. @param {import("./scene.js").SceneState} state @returns {{pixels: number, text: string}} */
export function chooseScaleBar({ scale, isCalibrated, voxelSize }) {
  const unitLength = isCalibrated ? 1 : 1 / voxelSize[2];
  const maxLength = MAX_SCALE_BAR_PIXELS / (scale * unitLength);
  const power = 10 ** Math.floor(Math.log10(maxLength));
  const length = [5, 2, 1].map((digit) => digit * power).find((candidate) => candidate <= maxLength) ?? power;
  return { pixels: length * scale * unitLength, text: `${formatNumber(length)} ${isCalibrated ? "µm" : "px"}` };
}

/** Scale bar with a round length. */
export class ScaleBar {
  /** @param {Scene} scene */
  constructor(scene) {
    this.lengthText = element("span");
    this.root = element("div", { class: "scale-bar" }, this.lengthText);
    scene.subscribe((previousState) => {
      if (hasChanged(previousState, scene.state, ["scale", "isCalibrated", "voxelSize"])) this.#show(scene.state);
    });
  }

  /** @param {import("./scene.js").SceneState} state */
  #show(state) {
    const { pixels, text } = chooseScaleBar(state);
    this.root.style.width = `${pixels}px`;
    this.lengthText.textContent = text;
  }
}

/** Circle that shows the object diameter. To change the diameter, the user drags the circle, or draws a line across an object with Shift held down. */
export class DiameterCircle {
  /** @param {Scene} scene @param {HTMLElement} stage element in which the circle is centered @param {(diameter: number) => void} onchange called with the dragged diameter in voxels at full resolution */
  constructor(scene, stage, onchange) {
    this.scene = scene;
    this.root = element("div", { class: "circle", hidden: true });
    /** Diameter in voxels at full resolution, null to hide the circle. @type {number | null} */
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
      setLength(2 * distance);
    });
    const setLength = (/** @type {number} */ pixels) => {
      const diameter = Math.max(2, Math.round((2 * pixels) / this.#getPixelsPerVoxel()) / 2);
      this.show(diameter);
      onchange(diameter);
    };
    this.#drawLines(stage, setLength);
    scene.subscribe((previousState) => {
      if (hasChanged(previousState, scene.state, ["image", "scale", "voxelSize"])) this.#resize();
    });
  }

  /** Let the user draw lines while the circle is shown. @param {HTMLElement} stage @param {(pixels: number) => void} onlength called with the length of the line */
  #drawLines(stage, onlength) {
    const line = element("div", { class: "diameter-line", hidden: true });
    stage.append(line);
    const start = { pointer: -1, x: 0, y: 0 };
    const listener = { capture: true };
    stage.addEventListener(
      "pointerdown",
      (event) => {
        if (!event.shiftKey || event.button !== 0 || this.root.hidden) return;
        // Otherwise the views would move.
        event.stopImmediatePropagation();
        stage.setPointerCapture(event.pointerId);
        const { left, top } = stage.getBoundingClientRect();
        Object.assign(start, { pointer: event.pointerId, x: event.clientX - left, y: event.clientY - top });
        Object.assign(line.style, { left: `${start.x}px`, top: `${start.y}px`, width: "0" });
        line.hidden = false;
      },
      listener,
    );
    stage.addEventListener(
      "pointermove",
      (event) => {
        if (event.pointerId !== start.pointer) return;
        event.stopImmediatePropagation();
        const { left, top } = stage.getBoundingClientRect();
        const [dx, dy] = [event.clientX - left - start.x, event.clientY - top - start.y];
        const pixels = Math.hypot(dx, dy);
        line.style.width = `${pixels}px`;
        line.style.transform = `rotate(${Math.atan2(dy, dx)}rad)`;
        onlength(pixels);
      },
      listener,
    );
    for (const type of /** @type {const} */ (["pointerup", "pointercancel"]))
      stage.addEventListener(
        type,
        (event) => {
          if (event.pointerId !== start.pointer) return;
          event.stopImmediatePropagation();
          start.pointer = -1;
          line.hidden = true;
        },
        listener,
      );
  }

  /** Show or hide the circle. @param {number | null} diameter in voxels at full resolution, null to hide the circle */
  show(diameter) {
    this.diameter = diameter;
    this.#resize();
  }

  #getPixelsPerVoxel() {
    const { image, scale, voxelSize } = this.scene.state;
    return (scale * voxelSize[2]) / (image?.step[2] ?? 1);
  }

  #resize() {
    this.root.hidden = !this.diameter || this.scene.state.image === null;
    if (this.diameter && !this.root.hidden)
      this.root.style.width = this.root.style.height = `${this.diameter * this.#getPixelsPerVoxel()}px`;
  }
}
