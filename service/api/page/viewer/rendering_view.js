/** 3D view: a rendering that the user can rotate, cut open and click, with its axes and a scale bar. */

import { button, element } from "../core/elements.js";
import { Camera } from "./camera.js";
import { chooseScaleBar } from "./rulers.js";
import { valueAt } from "./scene.js";
import { VolumeRenderer } from "./volume_renderer.js";
import { getZoomFactor } from "./wheel.js";

/** @typedef {import("./scene.js").Scene} Scene */
/** @typedef {import("./scene.js").Triple} Triple */
/** @typedef {import("./camera.js").Point} Point */

const AXIS_NAMES = ["x", "y", "z"];
/** Largest movement of the pointer that still counts as a click. */
const MAX_CLICK_MOVEMENT_PIXELS = 4;
const RADIANS_PER_PIXEL = 1 / 120;
const RADIANS_PER_KEY = 0.15;
/** Distance of the names of the axes from the ends of the axes. The longest edge of the box is 2. */
const LABEL_GAP = 0.1;

/** The canvas, the labels on the canvas, and the tools. */
export class RenderingView {
  /** @param {Scene} scene @param {(position: Triple) => void} onpick called with the voxel that the user clicked */
  constructor(scene, onpick) {
    this.scene = scene;
    this.onpick = onpick;
    this.camera = new Camera();
    /** Whether to show the gray values although there are objects. */
    this.showsIntensity = false;
    this.canvas = element("canvas", {
      class: "rendering",
      tabIndex: 0,
      role: "img",
      "aria-label": "3D view of the stack. Use the arrow keys to rotate it, and click an object to select it.",
    });
    this.renderer = new VolumeRenderer(this.canvas, scene, this.camera);
    this.axisLabels = AXIS_NAMES.map((name) => element("span", { class: `axis-label axis-${name}` }, name));
    this.scaleText = element("span");
    this.scaleBar = element("div", { class: "scale-bar" }, this.scaleText);
    this.stage = element("div", { class: "rendering-stage" }, this.canvas, ...this.axisLabels, this.scaleBar);
    this.objectsToggle = button("Objects", () => this.#setIntensity(false), "quiet toggle");
    this.intensityToggle = button("Intensity", () => this.#setIntensity(true), "quiet toggle");
    this.tools = element(
      "div",
      { class: "rendering-tools", role: "group", "aria-label": "3D view" },
      this.objectsToggle,
      this.intensityToggle,
      ...this.#createCutControls(),
    );
    this.#listenToPointer();
    this.#listenToKeys();
  }

  get isSupported() {
    return this.renderer.isSupported;
  }

  /** Create the controls that cut the stack open. */
  #createCutControls() {
    const { cut } = this.camera;
    const axisSelect = element(
      "select",
      {
        "aria-label": "Axis along which the 3D view is cut",
        onchange: () => {
          cut.axis = AXIS_NAMES.indexOf(axisSelect.value);
          this.draw();
        },
      },
      ...AXIS_NAMES.map((name, axis) => element("option", { selected: axis === cut.axis }, name)),
    );
    const slider = element("input", {
      type: "range",
      min: "0",
      max: "0.99",
      step: "0.01",
      value: "0",
      "aria-label": "Removed part of the 3D view",
      oninput: () => {
        cut.fraction = Number(slider.value);
        this.draw();
      },
    });
    return [element("label", { class: "inline-label" }, "Cut", axisSelect), slider];
  }

  /** @param {boolean} showsIntensity */
  #setIntensity(showsIntensity) {
    this.showsIntensity = showsIntensity;
    this.draw();
  }

  #listenToPointer() {
    const { canvas, camera } = this;
    let movedPixels = 0;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      movedPixels = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!canvas.hasPointerCapture(event.pointerId)) return;
      movedPixels += Math.hypot(event.movementX, event.movementY);
      if (movedPixels <= MAX_CLICK_MOVEMENT_PIXELS) return;
      camera.rotate(event.movementX * RADIANS_PER_PIXEL, event.movementY * RADIANS_PER_PIXEL);
      this.draw();
    });
    canvas.addEventListener("click", (event) => {
      if (movedPixels <= MAX_CLICK_MOVEMENT_PIXELS) this.#pick(event.offsetX, event.offsetY);
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        camera.zoomBy(getZoomFactor(event));
        this.draw();
      },
      { passive: false },
    );
  }

  #listenToKeys() {
    this.canvas.addEventListener("keydown", (event) => {
      const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
      const direction = directions[/** @type {keyof typeof directions} */ (event.key)];
      if (!direction) return;
      event.preventDefault();
      this.camera.rotate(direction[0] * RADIANS_PER_KEY, direction[1] * RADIANS_PER_KEY);
      this.draw();
    });
  }

  get #showsObjects() {
    const { labels, showObjects } = this.scene.state;
    return labels !== null && showObjects && !this.showsIntensity;
  }

  /** Pick the first visible object, or the brightest voxel, under a position on the canvas. @param {number} x @param {number} y in pixels */
  #pick(x, y) {
    const { image, labels, hiddenFlags } = this.scene.state;
    if (image === null) return;
    const { clientWidth, clientHeight } = this.canvas;
    const voxels = this.camera.listVoxelsOnRay(x, y, clientWidth, clientHeight, image.shape);
    const isVisible = (/** @type {Triple} */ voxel) => {
      const id = labels ? valueAt(labels, voxel) : 0;
      return id !== 0 && !hiddenFlags?.[id];
    };
    const getBrighter = (/** @type {Triple} */ first, /** @type {Triple} */ second) =>
      valueAt(image, second) > valueAt(image, first) ? second : first;
    const voxel = this.#showsObjects ? voxels.find(isVisible) : voxels.length ? voxels.reduce(getBrighter) : undefined;
    if (voxel) this.onpick(voxel);
  }

  /** Draw in the next frame. */
  draw() {
    this.objectsToggle.disabled = this.scene.state.labels === null;
    this.objectsToggle.setAttribute("aria-pressed", String(this.#showsObjects));
    this.intensityToggle.setAttribute("aria-pressed", String(!this.#showsObjects));
    this.renderer.showsObjects = this.#showsObjects;
    this.renderer.draw(() => this.#placeLabels());
  }

  /** Move the names of the axes to the ends of the axes, and update the scale bar. */
  #placeLabels() {
    const { clientWidth, clientHeight } = this.canvas;
    const { camera, scene } = this;
    for (const [axis, label] of this.axisLabels.entries()) {
      const end = /** @type {Point} */ (camera.box.map((half, other) => (other === axis ? half + LABEL_GAP : -half)));
      const [x, y] = camera.project(end, clientWidth, clientHeight);
      label.style.transform = `translate(${x}px, ${y}px) translate(-50%, -50%)`;
    }
    const scale = camera.getScale(clientWidth, clientHeight);
    const { pixels, text } = chooseScaleBar({ ...scene.state, scale });
    this.scaleBar.style.width = `${pixels}px`;
    this.scaleText.textContent = text;
  }
}
