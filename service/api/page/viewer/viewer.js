/** Three orthogonal views with one crosshair and one scale, and the maximum projection beside them. */

import { button, element } from "../core/elements.js";
import { number } from "../core/words.js";
import { ACROSS, paintGrey, project, quantiles } from "../volumes/slices.js";
import { clamp, View } from "./slice_view.js";

/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../volumes/planes.js").Triple} Triple */
/** @typedef {import("../volumes/slices.js").Axis} Axis */
/** @typedef {import("./slice_view.js").Scene} Scene */

/** @typedef {import("./slice_view.js").Layer} Layer */
/** @typedef {import("./slice_view.js").Sharp} Sharp */

const AXES = /** @type {Axis[]} */ ([0, 1, 2]);
const IDLE_MILLISECONDS = 200;
const MOST_ZOOM = 60;
const CLICK_PIXELS = 4;

export class Viewer extends EventTarget {
  /** @param {HTMLElement} root */
  constructor(root) {
    super();
    this.root = root;
    /** @type {Scene} */
    this.scene = {
      image: null,
      overlays: [],
      labels: null,
      sharp: [null, null, null],
      voxel: [1, 1, 1],
      at: [0, 0, 0],
      centre: [0, 0, 0],
      scale: 1,
      colour: [255, 255, 255],
      contrast: [0, 1],
      range: [0, 1],
      smooth: true,
      shown: true,
      filled: false,
      opacity: 0.9,
      selected: 0,
      hidden: null,
      entries: null,
    };
    /** The layer that the sliders of contrast are for. @type {Layer} */
    this.adjusted = this.scene;
    /** Fetches a plane of the whole stack as it is. @type {((axis: Axis, at: number, signal: AbortSignal) => Promise<Sharp>) | null} */
    this.fetchSharp = null;
    /** Fetches the whole stack in full resolution. @type {((signal: AbortSignal, onblock: (volume: Volume, share: number) => void) => Promise<Volume>) | null} */
    this.fetchWhole = null;
    /** By axis the plane that is being fetched. */
    this.awaited = [-1, -1, -1];
    this.sharpening = new AbortController();
    this.timer = 0;
    this.zoom = 1;
    this.views = /** @type {[View, View, View]} */ (
      [0, 1, 2].map((axis) => new View(/** @type {Axis} */ (axis), this.scene))
    );
    /** @type {{volume: Volume, plane: import("../volumes/slices.js").Plane} | undefined} */
    this.projected = undefined;
    this.dirty = new Set();
    this.projection = element("canvas", {
      class: "projection",
      role: "img",
      "aria-label": "Maximum projection along z",
    });
    this.scaleBar = element("div", { class: "scale-bar" }, element("span"));
    this.circle = element("div", { class: "circle", hidden: true });
    this.readout = element("output", { class: "readout" });
    this.waiting = element("div", { class: "waiting", role: "status" });
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
    const corner = element(
      "div",
      { class: "view corner" },
      element("div", { class: "stage still" }, this.projection, this.solidCanvas),
      element("div", { class: "view-foot" }, this.maximum, this.turned, this.larger),
    );
    this.views[0].stage.append(this.scaleBar, this.circle, this.readout);
    this.views[0].root.append(
      element(
        "div",
        { class: "zoom", role: "group", "aria-label": "Zoom" },
        button("+", () => this.zoomBy(1.4), "icon"),
        button("−", () => this.zoomBy(1 / 1.4), "icon"),
        button("Fit", () => this.fit()),
      ),
    );
    corner.addEventListener("keydown", ({ key }) => {
      if (key === "Escape" && this.grid.classList.contains("alone")) this.#enlarge();
    });
    this.grid = element("div", { class: "views" }, this.views[0].root, this.views[2].root, this.views[1].root, corner);
    this.toolbar = this.#makeToolbar();
    root.replaceChildren(this.toolbar, this.grid, this.waiting);
    root.classList.add("viewer", "empty");
    for (const view of this.views) this.#listen(view);
    new ResizeObserver(() => this.#layOut()).observe(this.grid);
    this.projection.addEventListener("click", (event) => this.#jump(event));
    this.#listenToCircle();
  }

  #makeToolbar() {
    const { scene } = this;
    const range = { type: "range", min: "0", max: "1000" };
    this.low = element("input", {
      ...range,
      value: "0",
      "aria-label": "Darkest grey value",
      oninput: () => this.#setContrast(),
    });
    this.high = element("input", {
      ...range,
      value: "1000",
      "aria-label": "Brightest grey value",
      oninput: () => this.#setContrast(),
    });
    this.fill = button("Filled", () => this.toggle("filled"), "quiet toggle");
    this.show = button("Objects", () => this.toggle("shown"), "quiet toggle");
    this.soft = button("Smooth", () => this.toggle("smooth"), "quiet toggle");
    this.opacity = element("input", {
      type: "range",
      min: "0",
      max: "1",
      step: "0.05",
      value: String(scene.opacity),
      "aria-label": "Opacity of the objects",
      oninput: () => {
        scene.opacity = Number(this.opacity?.value);
        this.draw();
      },
    });
    this.objectTools = element(
      "div",
      { class: "tools", hidden: true },
      this.show,
      this.fill,
      element("label", { class: "slim" }, "Opacity", this.opacity),
    );
    return element(
      "div",
      { class: "toolbar", role: "toolbar", "aria-label": "Display" },
      element(
        "div",
        { class: "tools" },
        element("label", { class: "slim" }, "Contrast", this.low),
        this.high,
        this.soft,
      ),
      this.objectTools,
    );
  }

  /**
   * Begin to show a stack, of which planes have arrived or will.
   * @param {Volume} image @param {import("openapi").VoxelSize | null} voxelSize
   */
  open(image, voxelSize) {
    const { scene } = this;
    const same = scene.image !== null && String(scene.image.whole) === String(image.whole);
    scene.image = image;
    this.#forgetSharp();
    this.root.classList.remove("empty");
    this.setVoxelSize(voxelSize);
    if (!same) {
      scene.at = [image.shape[0] >> 1, image.shape[1] >> 1, image.shape[2] >> 1];
      scene.labels = null;
      scene.selected = 0;
      scene.hidden = scene.entries = null;
      this.objectTools?.setAttribute("hidden", "");
      this.fit();
    }
  }

  /** @param {import("openapi").VoxelSize | null} voxelSize micrometres; a voxel counts as a cube without one */
  setVoxelSize(voxelSize) {
    const { scene } = this;
    if (scene.image === null) return;
    const edges = voxelSize ?? { z: 1, y: 1, x: 1 };
    const { step } = scene.image;
    scene.voxel = [edges.z * step[0], edges.y * step[1], edges.x * step[2]];
    this.known = voxelSize !== null;
    this.#layOut();
  }

  /** Set the contrast from the stack, and make its projection. */
  settle() {
    stretch(this.scene);
    this.adjust(this.adjusted);
    this.#drawProjection();
    this.draw();
  }

  /** @param {Volume | null} labels */
  setLabels(labels) {
    this.scene.labels = labels;
    this.#forgetSharp();
    this.scene.selected = 0;
    this.scene.hidden = this.scene.entries = null;
    this.objectTools?.toggleAttribute("hidden", labels === null);
    this.draw();
  }

  /** @param {Uint8Array | null} hidden */
  hide(hidden) {
    this.scene.hidden = hidden;
    this.draw();
  }

  /** @param {number} id 0: none @param {Triple} [at] voxel of the whole stack that the views go to */
  select(id, at) {
    const { scene } = this;
    scene.selected = id;
    if (at && scene.image) {
      const { step, shape } = scene.image;
      scene.at = /** @type {Triple} */ (at.map((place, axis) => clamp(Math.round(place / step[axis]), shape[axis])));
      this.#keepInSight();
    }
    this.drawNow();
  }

  /** @param {"filled" | "shown" | "smooth"} name */
  toggle(name) {
    this.scene[name] = !this.scene[name];
    this.draw();
  }

  fit() {
    const { image } = this.scene;
    if (image === null) return;
    this.zoom = 1;
    this.scene.centre = /** @type {Triple} */ (image.shape.map((length) => length / 2));
    this.#layOut();
  }

  /** @param {number} factor @param {Triple} [about] voxel that stays where it is */
  zoomBy(factor, about = /** @type {Triple} */ ([...this.scene.at])) {
    const { scene } = this;
    const zoom = Math.max(0.5, Math.min(MOST_ZOOM, this.zoom * factor));
    const ratio = this.zoom / zoom;
    scene.centre = /** @type {Triple} */ (
      scene.centre.map((place, axis) => about[axis] + (place - about[axis]) * ratio)
    );
    this.zoom = zoom;
    this.#setScale();
    this.draw();
  }

  /** @param {Axis} axis @param {number} planes */
  move(axis, planes) {
    const { scene } = this;
    if (scene.image === null) return;
    const next = clamp(scene.at[axis] + planes, scene.image.shape[axis]);
    if (next === scene.at[axis]) return;
    scene.at[axis] = next;
    this.draw(axis);
  }

  /** Draw with the next frame: all views, or one that goes to another plane. @param {Axis} [axis] */
  draw(axis) {
    if (this.dirty.size === 0) requestAnimationFrame(() => this.drawNow(this.dirty));
    for (const each of axis === undefined ? [0, 1, 2] : [axis]) this.dirty.add(each);
  }

  drawNow(axes = new Set([0, 1, 2])) {
    const began = performance.now();
    for (const view of this.views) {
      if (axes.has(view.axis)) view.draw();
      else view.moveCross();
    }
    axes.clear();
    this.#describe();
    this.#sharpen();
    this.dispatchEvent(new Event("draw"));
    if (!this.solidCanvas.hidden) this.solid?.draw();
    performance.measure("draw", { start: began });
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
    this.drawNow();
  }

  #enlarge() {
    this.grid.classList.toggle("alone");
    this.#layOut();
  }

  /** Have planes fetched in full resolution once the reader stays on them, where what is here is coarser. */
  #sharpen() {
    const { image, labels, at, sharp } = this.scene;
    if (image === null || this.fetchSharp === null) return;
    const wanted = AXES.filter((axis) => {
      const here = sharp[axis];
      const done = here?.at === at[axis] && (here.labels !== null) === (labels !== null);
      return !done && this.awaited[axis] !== at[axis] && ACROSS[axis].some((across) => image.step[across] > 1);
    });
    if (wanted.length === 0) return;
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.#fetchSharpPlanes(image, wanted), IDLE_MILLISECONDS);
  }

  /** @param {Volume} image @param {Axis[]} axes */
  async #fetchSharpPlanes(image, axes) {
    const { scene, sharpening } = this;
    await Promise.all(
      axes.map(async (axis) => {
        const wanted = scene.at[axis];
        this.awaited[axis] = wanted;
        const found = await this.fetchSharp?.(axis, wanted * image.step[axis], sharpening.signal).catch(() => null);
        if (this.awaited[axis] === wanted) this.awaited[axis] = -1;
        if (!found || sharpening.signal.aborted || scene.at[axis] !== wanted) return;
        scene.sharp[axis] = { at: wanted, ...found };
        this.draw(axis);
      }),
    );
  }

  #forgetSharp() {
    this.sharpening.abort();
    this.sharpening = new AbortController();
    this.scene.sharp = [null, null, null];
    this.awaited = [-1, -1, -1];
  }

  /** Show the same place at the same scale and contrast as another viewer does. @param {Viewer} other */
  follow(other) {
    const { scene } = this;
    const { at, centre, contrast } = other.scene;
    if (scene.image === null || other.scene.image === null) return;
    const theirs = String([at, centre, other.zoom, contrast]);
    if (theirs === String([scene.at, scene.centre, this.zoom, scene.contrast])) return;
    scene.at = [...at];
    scene.centre = [...centre];
    scene.contrast = [...contrast];
    this.zoom = other.zoom;
    this.#setScale();
    this.adjust(this.adjusted);
    this.drawNow();
  }

  /** The picture of all three views, with their outlines, as they are seen. @returns {Promise<Blob>} */
  picture() {
    const gap = 6;
    const [xy, xz, zy] = this.views;
    const whole = document.createElement("canvas");
    whole.width = xy.base.width + gap + zy.base.width;
    whole.height = xy.base.height + gap + xz.base.height;
    const context = /** @type {CanvasRenderingContext2D} */ (whole.getContext("2d"));
    context.fillRect(0, 0, whole.width, whole.height);
    for (const [view, x, y] of /** @type {[View, number, number][]} */ ([
      [xy, 0, 0],
      [zy, xy.base.width + gap, 0],
      [xz, 0, xy.base.height + gap],
    ])) {
      context.globalAlpha = 1;
      context.drawImage(view.base, x, y);
      context.globalAlpha = this.scene.opacity;
      if (this.scene.shown) context.drawImage(view.over, x, y);
    }
    return new Promise((resolve, reject) => {
      whole.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("The picture cannot be made."))), "image/png");
    });
  }

  /** A small picture of the middle, for the list of jobs. @returns {string} a data address */
  thumbnail() {
    const { base, over } = this.views[0];
    const small = document.createElement("canvas");
    small.width = 96;
    small.height = 72;
    const context = /** @type {CanvasRenderingContext2D} */ (small.getContext("2d"));
    const scale = Math.max(small.width / base.width, small.height / base.height);
    const [x, y] = [(small.width - base.width * scale) / 2, (small.height - base.height * scale) / 2];
    for (const canvas of [base, over]) context.drawImage(canvas, x, y, base.width * scale, base.height * scale);
    return small.toDataURL("image/jpeg", 0.7);
  }

  /** @param {number | null} pixels diameter to show as a circle on the XY view, in voxels of the whole stack */
  showDiameter(pixels) {
    this.diameter = pixels;
    this.#placeCircle();
  }

  #placeCircle() {
    const { scene, circle } = this;
    circle.hidden = !this.diameter || scene.image === null;
    if (!this.diameter || scene.image === null) return;
    const width = (this.diameter / scene.image.step[2]) * scene.scale * scene.voxel[2];
    circle.style.width = circle.style.height = `${width}px`;
  }

  #listenToCircle() {
    this.circle.addEventListener("pointerdown", (event) => {
      event.stopPropagation();
      this.circle.setPointerCapture(event.pointerId);
    });
    this.circle.addEventListener("pointermove", (event) => {
      if (!this.circle.hasPointerCapture(event.pointerId)) return;
      event.stopPropagation();
      const stage = this.views[0].stage.getBoundingClientRect();
      const distance = Math.hypot(
        event.clientX - stage.left - stage.width / 2,
        event.clientY - stage.top - stage.height / 2,
      );
      const { scene } = this;
      const pixels = ((2 * distance) / (scene.scale * scene.voxel[2])) * (scene.image?.step[2] ?? 1);
      this.showDiameter(Math.max(2, Math.round(pixels * 2) / 2));
      this.dispatchEvent(new CustomEvent("diameter", { detail: this.diameter }));
    });
  }

  #layOut() {
    const { image, voxel } = this.scene;
    if (image === null) return;
    const [z, y, x] = image.shape.map((length, axis) => length * voxel[axis]);
    const share = (/** @type {number} */ length) => Math.max(0.26, Math.min(0.45, z / (z + length)));
    this.grid.style.gridTemplateColumns = `minmax(0, ${1 - share(x)}fr) minmax(0, ${share(x)}fr)`;
    this.grid.style.gridTemplateRows = `minmax(0, ${1 - share(y)}fr) minmax(0, ${share(y)}fr)`;
    const alone = this.grid.classList.contains("alone");
    if (alone) this.grid.style.gridTemplateColumns = this.grid.style.gridTemplateRows = "minmax(0, 1fr)";
    for (const view of this.views) view.resize();
    this.#setScale();
    this.drawNow();
    this.#drawProjection();
  }

  #setScale() {
    const { scene } = this;
    if (scene.image === null) return;
    const [z, y, x] = scene.image.shape.map((length, axis) => length * scene.voxel[axis]);
    const [xy, xz, zy] = this.views.map((view) => view.stage);
    const fitting = Math.min(xy.clientWidth / x, xy.clientHeight / y, zy.clientWidth / z, xz.clientHeight / z);
    scene.scale = Math.max(fitting * 0.97 * this.zoom, 1e-9);
    const pixel = this.known ? 1 : 1 / scene.voxel[2];
    const wanted = 90 / (scene.scale * pixel);
    const power = 10 ** Math.floor(Math.log10(wanted));
    const length = [5, 2, 1].map((digit) => digit * power).find((candidate) => candidate <= wanted) ?? power;
    this.scaleBar.style.width = `${length * scene.scale * pixel}px`;
    if (this.scaleBar.firstChild)
      this.scaleBar.firstChild.textContent = `${number(length)} ${this.known ? "µm" : "px"}`;
    this.#placeCircle();
  }

  #keepInSight() {
    const { scene } = this;
    for (const view of this.views.slice(0, 2)) {
      const place = view.placement();
      const x = place.left + scene.at[2] * place.scaleX;
      if (x < 0 || x > view.stage.clientWidth) scene.centre[2] = scene.at[2];
      const down = view.axis === 0 ? 1 : 0;
      const y = place.top + scene.at[down] * place.scaleY;
      if (y < 0 || y > view.stage.clientHeight) scene.centre[down] = scene.at[down];
    }
  }

  /** @param {View} view */
  #listen(view) {
    const { stage } = view;
    view.slider.addEventListener("input", () =>
      this.move(view.axis, Number(view.slider.value) - this.scene.at[view.axis]),
    );
    stage.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        const sign = Math.sign(event.deltaY || event.deltaX);
        if (event.ctrlKey || event.metaKey)
          this.zoomBy(sign < 0 ? 1.2 : 1 / 1.2, view.voxelAt(event.offsetX, event.offsetY));
        else this.move(view.axis, sign);
      },
      { passive: false },
    );
    stage.addEventListener("dblclick", () => this.fit());
    stage.addEventListener("keydown", (event) => this.#onKey(event, view.axis));
    this.#listenToPointers(view);
  }

  /** One pointer drags the stack, two zoom, and one that has not moved selects. @param {View} view */
  #listenToPointers(view) {
    const { stage } = view;
    /** @type {Map<number, [number, number]>} */
    const pointers = new Map();
    let moved = 0;
    stage.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      stage.setPointerCapture(event.pointerId);
      pointers.set(event.pointerId, [event.clientX, event.clientY]);
      if (pointers.size === 1) moved = 0;
    });
    stage.addEventListener("pointermove", (event) => {
      const before = pointers.get(event.pointerId);
      if (!before) return;
      const spread = apart(pointers);
      pointers.set(event.pointerId, [event.clientX, event.clientY]);
      const [dx, dy] = [event.clientX - before[0], event.clientY - before[1]];
      moved += Math.hypot(dx, dy);
      if (pointers.size === 2) this.zoomBy(apart(pointers) / Math.max(spread, 1));
      else if (moved > CLICK_PIXELS) this.#pan(view, dx, dy);
    });
    stage.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
    stage.addEventListener("pointerup", (event) => {
      const alone = pointers.size === 1 && pointers.has(event.pointerId);
      pointers.delete(event.pointerId);
      if (alone && moved <= CLICK_PIXELS) this.#pick(view, event);
    });
  }

  /** @param {View} view @param {number} dx @param {number} dy */
  #pan(view, dx, dy) {
    const place = view.placement();
    const [right, down] = [view.axis === 2 ? 0 : 2, view.axis === 1 ? 0 : 1];
    this.scene.centre[right] -= dx / place.scaleX;
    this.scene.centre[down] -= dy / place.scaleY;
    this.draw();
  }

  /** @param {View} view @param {MouseEvent} event */
  #pick(view, event) {
    const bounds = view.stage.getBoundingClientRect();
    this.scene.at = view.voxelAt(event.clientX - bounds.left, event.clientY - bounds.top);
    const id = this.labelHere();
    this.scene.selected = id;
    this.draw();
    this.dispatchEvent(new CustomEvent("pick", { detail: id }));
  }

  /** @param {MouseEvent} event on the projection */
  #jump(event) {
    const { image } = this.scene;
    if (image === null) return;
    const bounds = this.projection.getBoundingClientRect();
    this.scene.at[1] = clamp(
      Math.floor(((event.clientY - bounds.top) / bounds.height) * image.shape[1]),
      image.shape[1],
    );
    this.scene.at[2] = clamp(
      Math.floor(((event.clientX - bounds.left) / bounds.width) * image.shape[2]),
      image.shape[2],
    );
    this.#keepInSight();
    this.draw();
  }

  /** @param {KeyboardEvent} event @param {Axis} axis */
  #onKey(event, axis) {
    /** @type {Record<string, () => void>} */
    const actions = {
      j: () => this.move(axis, 1),
      k: () => this.move(axis, -1),
      ArrowDown: () => this.move(axis, 1),
      ArrowUp: () => this.move(axis, -1),
      ArrowRight: () => this.move(axis, 1),
      ArrowLeft: () => this.move(axis, -1),
      PageDown: () => this.move(axis, 10),
      PageUp: () => this.move(axis, -10),
      Home: () => this.move(axis, -1e6),
      End: () => this.move(axis, 1e6),
      "+": () => this.zoomBy(1.4),
      "-": () => this.zoomBy(1 / 1.4),
      0: () => this.fit(),
      f: () => this.toggle("filled"),
      o: () => this.toggle("shown"),
      Escape: () => {
        this.select(0);
        this.dispatchEvent(new CustomEvent("pick", { detail: 0 }));
      },
    };
    const action = event.ctrlKey || event.metaKey || event.altKey ? undefined : actions[event.key];
    if (action === undefined) return;
    event.preventDefault();
    action();
  }

  labelHere() {
    const { labels, at } = this.scene;
    return labels === null ? 0 : labels.data[(at[0] * labels.shape[1] + at[1]) * labels.shape[2] + at[2]];
  }

  #describe() {
    const { image, at, filled, shown, smooth } = this.scene;
    if (image === null) return;
    const value = image.data[(at[0] * image.shape[1] + at[1]) * image.shape[2] + at[2]];
    const label = this.labelHere();
    this.readout.value = `grey ${number(value)}${label ? `   object ${label}` : ""}`;
    for (const [toggle, on] of /** @type {[HTMLElement, boolean][]} */ ([
      [this.fill, filled],
      [this.show, shown],
      [this.soft, smooth],
      [this.maximum, this.solidCanvas.hidden],
      [this.turned, !this.solidCanvas.hidden],
      [this.larger, this.grid.classList.contains("alone")],
    ])) {
      toggle.setAttribute("aria-pressed", String(on));
    }
  }

  #setContrast() {
    if (!this.low || !this.high) return;
    const [least, most] = this.adjusted.range;
    const [low, high] = [this.low, this.high].map(
      (slider) => least + (Number(slider.value) / 1000) ** 2 * (most - least),
    );
    this.adjusted.contrast = [low, Math.max(high, low + (most - least) / 1e4)];
    this.#drawProjection();
    this.draw();
  }

  /** Have the sliders show and set the contrast of a layer. @param {Layer} layer */
  adjust(layer) {
    this.adjusted = layer;
    if (!this.low || !this.high) return;
    const [least, most] = layer.range;
    for (const [slider, value] of /** @type {[HTMLInputElement, number][]} */ ([
      [this.low, layer.contrast[0]],
      [this.high, layer.contrast[1]],
    ])) {
      slider.value = String(Math.sqrt(Math.max(0, value - least) / (most - least)) * 1000);
    }
  }

  #drawProjection() {
    const { image, contrast, voxel } = this.scene;
    if (image === null) return;
    if (this.projected?.volume !== image) this.projected = { volume: image, plane: project(image) };
    const { plane } = this.projected;
    this.projection.width = plane.width;
    this.projection.height = plane.height;
    this.projection.getContext("2d")?.putImageData(paintGrey(plane, ...contrast), 0, 0);
    const stage = /** @type {HTMLElement} */ (this.projection.parentElement);
    const [width, height] = [plane.width * voxel[2], plane.height * voxel[1]];
    const scale = Math.min(stage.clientWidth / width, stage.clientHeight / height) * 0.94;
    this.projection.style.width = `${width * scale}px`;
    this.projection.style.height = `${height * scale}px`;
  }

  /** Make the projection again, as more planes have come. */
  refreshProjection() {
    this.projected = undefined;
    this.#drawProjection();
  }
}

/** Set the contrast of a layer by its grey values. @param {Layer} layer */
export function stretch(layer) {
  if (layer.image === null) return;
  const [least, low, high, most] = quantiles(layer.image.data, [0, 0.01, 0.998, 1]);
  layer.range = [least, Math.max(most, least + 1e-9)];
  layer.contrast = [low, Math.max(high, low + 1e-9)];
}

/** @param {Map<number, [number, number]>} pointers */
function apart(pointers) {
  const [one, other] = [...pointers.values()];
  return other ? Math.hypot(one[0] - other[0], one[1] - other[1]) : 0;
}
