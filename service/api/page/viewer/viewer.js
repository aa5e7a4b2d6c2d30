/** Three orthogonal views with one crosshair and one scale, and the maximum projection beside them. */

import { button, element } from "../core/elements.js";
import { number } from "../core/format.js";
import { CornerView } from "./corner_view.js";
import { DisplayTools } from "./display_tools.js";
import { listenToView } from "./navigation.js";
import { DiameterCircle, ScaleBar } from "./rulers.js";
import { AXES, clamp, createScene, fittingContrast, replaced, valueAt } from "./scene.js";
import { SharpPlanes } from "./sharp_planes.js";
import { SliceView } from "./slice_view.js";

/** @typedef {import("./scene.js").Volume} Volume */
/** @typedef {import("./scene.js").Triple} Triple */
/** @typedef {import("./scene.js").Axis} Axis */
/** @typedef {import("./scene.js").SceneState} SceneState */

const MOST_ZOOM = 60;
const BUTTON_ZOOM = 1.4;

/** Events: `pick` with the id of an object that was clicked, `diameter` as dragged, `draw` when the views were drawn. */
export class Viewer extends EventTarget {
  /** @param {HTMLElement} root */
  constructor(root) {
    super();
    this.root = root;
    this.scene = createScene();
    this.sharp = new SharpPlanes(this.scene);
    /** Fetches the whole stack in full resolution. @type {((signal: AbortSignal, onblock: (volume: Volume, share: number) => void) => Promise<Volume>) | null} */
    this.fetchWhole = null;
    this.views = /** @type {[SliceView, SliceView, SliceView]} */ (AXES.map((axis) => new SliceView(axis, this.scene)));
    /** The views that are drawn with the next frame. @type {Set<Axis>} */
    this.dirty = new Set();
    this.frame = 0;
    this.corner = new CornerView(
      this.scene,
      (y, x) => this.#jump(y, x),
      (large) => this.#enlargeCorner(large),
    );
    const [xy, xz, zy] = this.views;
    this.circle = new DiameterCircle(this.scene, xy.stage, (diameter) => this.#tell("diameter", diameter));
    this.readout = element("output", { class: "readout" });
    xy.stage.append(new ScaleBar(this.scene).root, this.circle.root, this.readout);
    xy.root.append(
      element(
        "div",
        { class: "zoom", role: "group", "aria-label": "Zoom" },
        button("+", () => this.zoomBy(BUTTON_ZOOM), "icon"),
        button("−", () => this.zoomBy(1 / BUTTON_ZOOM), "icon"),
        button("Fit", () => this.fit()),
      ),
    );
    /** What is being fetched, in words. */
    this.waiting = element("div", { class: "waiting", role: "status" });
    this.grid = element("div", { class: "views" }, xy.root, zy.root, xz.root, this.corner.root);
    this.toolbar = new DisplayTools(this.scene).root;
    root.replaceChildren(this.toolbar, this.grid, this.waiting);
    root.classList.add("viewer", "empty");
    for (const view of this.views) listenToView(this, view);
    this.scene.subscribe((before) => this.#drawChanged(before));
    new ResizeObserver(() => this.#layOut()).observe(this.grid);
  }

  /** @param {string} name @param {unknown} detail */
  #tell(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /**
   * Begin to show a stack, of which planes have arrived or will.
   * @param {Volume} image @param {import("openapi").VoxelSize | null} voxelSize
   */
  open(image, voxelSize) {
    const { state } = this.scene;
    const same = state.image !== null && String(state.image.whole) === String(image.whole);
    this.scene.set({ image });
    this.sharp.forget();
    this.root.classList.remove("empty");
    this.setVoxelSize(voxelSize);
    if (same) return;
    const at = /** @type {Triple} */ (image.shape.map((length) => length >> 1));
    this.scene.set({ at, labels: null, selected: 0, hidden: null, entries: null });
    this.fit();
  }

  /** @param {import("openapi").VoxelSize | null} voxelSize micrometres; a voxel counts as a cube without one */
  setVoxelSize(voxelSize) {
    const { image } = this.scene.state;
    if (image === null) return;
    const { z, y, x } = voxelSize ?? { z: 1, y: 1, x: 1 };
    const { step } = image;
    this.scene.set({ voxel: [z * step[0], y * step[1], x * step[2]], known: voxelSize !== null });
    this.#layOut();
  }

  /** Set the contrast from the stack, and make its projection. */
  settle() {
    const { image } = this.scene.state;
    if (image) this.scene.set(fittingContrast(image));
    this.corner.resize();
    this.draw();
  }

  /** Show planes of the stack that have come meanwhile. */
  refresh() {
    this.corner.refreshProjection();
    this.draw();
  }

  /** @param {Volume | null} labels */
  setLabels(labels) {
    this.sharp.forget();
    this.scene.set({ labels, selected: 0, hidden: null, entries: null });
  }

  /** @param {number} id 0: none @param {Triple} [at] voxel of the whole stack that the views go to */
  select(id, at) {
    const { image } = this.scene.state;
    if (at && image) {
      const voxel = at.map((place, axis) => clamp(Math.round(place / image.step[axis]), image.shape[axis]));
      this.#goTo(/** @type {Triple} */ (voxel));
    }
    this.scene.set({ selected: id });
    this.drawNow();
  }

  /** Select the object at a voxel, and tell of it. @param {Triple} at */
  pick(at) {
    const { labels } = this.scene.state;
    const id = labels === null ? 0 : valueAt(labels, at);
    this.scene.set({ at, selected: id });
    this.#tell("pick", id);
  }

  /** Select an object, and tell of it. @param {number} id 0: none */
  choose(id) {
    this.select(id);
    this.#tell("pick", id);
  }

  fit() {
    const { image } = this.scene.state;
    if (image === null) return;
    const centre = /** @type {Triple} */ (image.shape.map((length) => length / 2));
    this.scene.set({ zoom: 1, centre });
    this.#layOut();
  }

  /** @param {number} factor @param {Triple} [about] voxel that stays where it is */
  zoomBy(factor, about = this.scene.state.at) {
    const { state } = this.scene;
    const zoom = Math.max(0.5, Math.min(MOST_ZOOM, state.zoom * factor));
    const ratio = state.zoom / zoom;
    const centre = state.centre.map((place, axis) => about[axis] + (place - about[axis]) * ratio);
    this.scene.set({ zoom, centre: /** @type {Triple} */ (centre) });
    this.#setScale();
  }

  /** @param {Axis} axis @param {number} planes */
  move(axis, planes) {
    const { image, at } = this.scene.state;
    if (image === null) return;
    const next = clamp(at[axis] + planes, image.shape[axis]);
    if (next !== at[axis]) this.scene.set({ at: replaced(at, axis, next) });
  }

  /** Draw the views that a change concerns: a plane that is left and its full resolution are those of one view. @param {Readonly<SceneState>} before */
  #drawChanged(before) {
    const { state } = this.scene;
    const { at, sharp, ...others } = before;
    const shared = Object.keys(others).some((name) => Reflect.get(before, name) !== Reflect.get(state, name));
    if (shared) this.draw();
    else for (const axis of AXES) if (at[axis] !== state.at[axis] || sharp[axis] !== state.sharp[axis]) this.draw(axis);
  }

  /** Draw with the next frame: all views, or one that shows another plane. @param {Axis} [axis] */
  draw(axis) {
    for (const each of axis === undefined ? AXES : [axis]) this.dirty.add(each);
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      if (this.dirty.size > 0) this.drawNow(new Set(this.dirty));
    });
  }

  drawNow(axes = new Set(AXES)) {
    const began = performance.now();
    for (const view of this.views) {
      if (axes.has(view.axis)) view.draw();
      else view.moveCross();
    }
    for (const axis of axes) this.dirty.delete(axis);
    this.#describe();
    this.sharp.request();
    this.dispatchEvent(new Event("draw"));
    this.corner.draw();
    performance.measure("draw", { start: began });
  }

  #describe() {
    const { image, labels, at } = this.scene.state;
    if (image === null) return;
    const label = labels === null ? 0 : valueAt(labels, at);
    this.readout.value = `grey ${number(valueAt(image, at))}${label ? `   object ${label}` : ""}`;
  }

  /** Show the same place at the same scale and contrast as another viewer does. @param {Viewer} other */
  follow(other) {
    const { at, centre, contrast, zoom, image } = other.scene.state;
    const { state } = this.scene;
    if (state.image === null || image === null) return;
    const own = String([state.at, state.centre, state.zoom, state.contrast]);
    if (String([at, centre, zoom, contrast]) === own) return;
    this.scene.set({ at, centre, contrast, zoom });
    this.#setScale();
    this.drawNow();
  }

  /** @param {boolean} large whether the corner takes the place of all views */
  #enlargeCorner(large) {
    this.grid.classList.toggle("alone", large);
    this.#layOut();
  }

  #layOut() {
    const { image, voxel } = this.scene.state;
    if (image === null) return;
    const [z, y, x] = image.shape.map((length, axis) => length * voxel[axis]);
    const share = (/** @type {number} */ length) => Math.max(0.26, Math.min(0.45, z / (z + length)));
    const { style } = this.grid;
    style.gridTemplateColumns = `minmax(0, ${1 - share(x)}fr) minmax(0, ${share(x)}fr)`;
    style.gridTemplateRows = `minmax(0, ${1 - share(y)}fr) minmax(0, ${share(y)}fr)`;
    if (this.corner.large) style.gridTemplateColumns = style.gridTemplateRows = "minmax(0, 1fr)";
    for (const view of this.views) view.resize();
    this.corner.resize();
    this.#setScale();
    this.drawNow();
  }

  /** Fit the stack into the views, as much larger as the reader has zoomed. */
  #setScale() {
    const { image, voxel, zoom } = this.scene.state;
    if (image === null) return;
    const [z, y, x] = image.shape.map((length, axis) => length * voxel[axis]);
    const [xy, xz, zy] = this.views.map((view) => view.stage);
    const fitting = Math.min(xy.clientWidth / x, xy.clientHeight / y, zy.clientWidth / z, xz.clientHeight / z);
    this.scene.set({ scale: Math.max(fitting * 0.97 * zoom, 1e-9) });
  }

  /** @param {number} y @param {number} x place in the projection, as shares of its edges */
  #jump(y, x) {
    const { image, at } = this.scene.state;
    if (image === null) return;
    const [, rows, columns] = image.shape;
    this.#goTo([at[0], clamp(Math.floor(y * rows), rows), clamp(Math.floor(x * columns), columns)]);
  }

  /** Go to a voxel, and have it in sight. @param {Triple} at */
  #goTo(at) {
    const centre = /** @type {Triple} */ ([...this.scene.state.centre]);
    for (const view of this.views.slice(0, 2)) {
      const place = view.placement();
      const x = place.left + at[2] * place.scaleX;
      if (x < 0 || x > view.stage.clientWidth) centre[2] = at[2];
      const down = view.axis === 0 ? 1 : 0;
      const y = place.top + at[down] * place.scaleY;
      if (y < 0 || y > view.stage.clientHeight) centre[down] = at[down];
    }
    this.scene.set(String(centre) === String(this.scene.state.centre) ? { at } : { at, centre });
  }
}
