/** Viewer with three orthogonal slices and a corner. The slices share a crosshair and a scale. */

import { button, element } from "../core/elements.js";
import { formatNumber } from "../core/format.js";
import { CornerView } from "./corner_view.js";
import { DisplayTools } from "./display_tools.js";
import { activateStage } from "./key_forwarding.js";
import { listenToView } from "./navigation.js";
import { PlaneLoader } from "./plane_loader.js";
import { DiameterCircle, ScaleBar } from "./rulers.js";
import { AXES, chooseContrast, clamp, createScene, replaceValue, valueAt } from "./scene.js";
import { SliceView } from "./slice_view.js";

/** @typedef {import("./scene.js").Volume} Volume */
/** @typedef {import("./scene.js").Triple} Triple */
/** @typedef {import("./scene.js").Axis} Axis */
/** @typedef {import("./scene.js").SceneState} SceneState */

/** Width at which the buttons of the corner view fit in one row. */
const MIN_CORNER_PIXELS = 176;
const MAX_ZOOM = 60;
const BUTTON_ZOOM_FACTOR = 1.4;

/**
 * Viewer of a stack and its labels. It dispatches `pick` with the id of the object that the user selected, `diameter`
 * with the diameter that the user dragged, and `draw` after drawing.
 */
export class Viewer extends EventTarget {
  /** @param {HTMLElement} root */
  constructor(root) {
    super();
    this.root = root;
    this.scene = createScene();
    this.planeLoader = new PlaneLoader(this.scene);
    /** Function that fetches the stack at full resolution, null if the stack is not stored. @type {((signal: AbortSignal, onblock: (volume: Volume, fraction: number) => void) => Promise<Volume>) | null} */
    this.fetchFullVolume = null;
    this.views = /** @type {[SliceView, SliceView, SliceView]} */ (AXES.map((axis) => new SliceView(axis, this.scene)));
    /** Axes of the views to redraw in the next frame. @type {Set<Axis>} */
    this.staleAxes = new Set();
    this.frameRequestId = 0;
    this.corner = new CornerView(
      this.scene,
      (y, x) => this.#goToProjectedPoint(y, x),
      (position) => {
        this.pick(position);
        this.#goToVoxel(position);
      },
      (isEnlarged) => this.#enlargeCorner(isEnlarged),
    );
    const [xy, xz, zy] = this.views;
    this.diameterCircle = new DiameterCircle(this.scene, xy.stage, (diameter) => this.#emit("diameter", diameter));
    this.readout = element("output", { class: "readout" });
    xy.stage.append(new ScaleBar(this.scene).root, this.diameterCircle.root, this.readout);
    xy.root.append(
      element(
        "div",
        { class: "zoom", role: "group", "aria-label": "Zoom" },
        button("+", () => this.zoomBy(BUTTON_ZOOM_FACTOR), "icon"),
        button("−", () => this.zoomBy(1 / BUTTON_ZOOM_FACTOR), "icon"),
        button("Fit", () => this.fit()),
      ),
    );
    /** Progress or error of the requests for planes. */
    this.fetchStatus = element("div", { class: "fetch-status", role: "status" });
    this.grid = element("div", { class: "views" }, xy.root, zy.root, xz.root, this.corner.root);
    this.toolbar = new DisplayTools(this.scene).root;
    root.replaceChildren(this.toolbar, this.grid, this.fetchStatus);
    root.classList.add("viewer", "empty");
    for (const view of this.views) listenToView(this, view);
    activateStage(this.views[0].stage);
    this.scene.subscribe((previousState) => this.#drawAffectedViews(previousState));
    new ResizeObserver(() => this.#layOut()).observe(this.grid);
  }

  /** @param {string} name @param {unknown} detail */
  #emit(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }

  /**
   * Show a stack. Some of its planes may not have been fetched yet.
   * @param {Volume} image @param {import("openapi").VoxelSize | null} voxelSize
   */
  open(image, voxelSize) {
    const { state } = this.scene;
    const hasSameShape = state.image !== null && String(state.image.fullShape) === String(image.fullShape);
    this.scene.set({ image });
    this.planeLoader.discardPlanes();
    this.root.classList.remove("empty");
    this.setVoxelSize(voxelSize);
    if (hasSameShape) return;
    const position = /** @type {Triple} */ (image.shape.map((length) => length >> 1));
    this.scene.set({ position, labels: null, selectedId: 0, hiddenFlags: null, colorIndices: null });
    this.fit();
  }

  /** Set the voxel size. @param {import("openapi").VoxelSize | null} voxelSize in micrometers; null if unknown, in which case voxels are displayed as cubes */
  setVoxelSize(voxelSize) {
    const { image } = this.scene.state;
    if (image === null) return;
    const { z, y, x } = voxelSize ?? { z: 1, y: 1, x: 1 };
    const { step } = image;
    this.scene.set({ voxelSize: [z * step[0], y * step[1], x * step[2]], isCalibrated: voxelSize !== null });
    this.#layOut();
  }

  /** Set the contrast from the gray values of the stack. */
  adjustContrast() {
    const { image } = this.scene.state;
    if (image) this.scene.set(chooseContrast(image));
    this.corner.invalidateProjection();
    this.draw();
  }

  /** Redraw the stack with the planes that have been fetched since the last drawing. */
  refresh() {
    this.corner.refreshProjection();
    this.draw();
  }

  /** @param {Volume | null} labels */
  setLabels(labels) {
    this.planeLoader.discardPlanes();
    this.scene.set({ labels, selectedId: 0, hiddenFlags: null, colorIndices: null });
  }

  /** Select an object. @param {number} id 0 for none @param {Triple} [position] voxel to go to, as indices into the full volume */
  select(id, position) {
    const { image } = this.scene.state;
    if (position && image) {
      const voxel = position.map((value, axis) => clamp(Math.round(value / image.step[axis]), image.shape[axis]));
      this.#goToVoxel(/** @type {Triple} */ (voxel));
    }
    this.scene.set({ selectedId: id });
    this.drawNow();
  }

  /** Select the object at a voxel, and dispatch `pick`. @param {Triple} position */
  pick(position) {
    const id = this.getVisibleObject(position);
    this.scene.set({ position, selectedId: id });
    this.#emit("pick", id);
  }

  /** @param {Triple} position @returns {number} the id of the object at a voxel, 0 if there is none or if it is hidden */
  getVisibleObject(position) {
    const { labels, hiddenFlags } = this.scene.state;
    const id = labels === null ? 0 : valueAt(labels, position);
    return hiddenFlags?.[id] ? 0 : id;
  }

  /** Select an object, and dispatch `pick`. @param {number} id 0 for none */
  selectAndNotify(id) {
    this.select(id);
    this.#emit("pick", id);
  }

  /** Zoom so that the stack fits in the views. */
  fit() {
    const { image } = this.scene.state;
    if (image === null) return;
    const center = /** @type {Triple} */ (image.shape.map((length) => length / 2));
    this.scene.set({ zoom: 1, center });
    this.#layOut();
  }

  /** Zoom in or out. @param {number} factor @param {Triple} [anchor] voxel that keeps its position on the screen */
  zoomBy(factor, anchor = this.scene.state.position) {
    const { state } = this.scene;
    const zoom = Math.max(0.5, Math.min(MAX_ZOOM, state.zoom * factor));
    const ratio = state.zoom / zoom;
    const center = state.center.map((value, axis) => anchor[axis] + (value - anchor[axis]) * ratio);
    this.scene.set({ zoom, center: /** @type {Triple} */ (center) });
    this.#setScale();
  }

  /** Move to another plane. @param {Axis} axis @param {number} planeCount number of planes to move by */
  move(axis, planeCount) {
    const { image, position } = this.scene.state;
    if (image === null) return;
    const nextPlane = clamp(position[axis] + planeCount, image.shape[axis]);
    if (nextPlane !== position[axis]) this.scene.set({ position: replaceValue(position, axis, nextPlane) });
  }

  /** Redraw the views that a change affects. A new position along one axis, or the arrival of a plane at full resolution, affects only one view. @param {Readonly<SceneState>} previousState */
  #drawAffectedViews(previousState) {
    const { state } = this.scene;
    const { position, finePlanes, ...otherState } = previousState;
    const affectsAllViews = Object.keys(otherState).some(
      (name) => Reflect.get(previousState, name) !== Reflect.get(state, name),
    );
    if (affectsAllViews) this.draw();
    else
      for (const axis of AXES)
        if (position[axis] !== state.position[axis] || finePlanes[axis] !== state.finePlanes[axis]) this.draw(axis);
  }

  /** Redraw one view or all views in the next frame. @param {Axis} [axis] */
  draw(axis) {
    for (const staleAxis of axis === undefined ? AXES : [axis]) this.staleAxes.add(staleAxis);
    this.frameRequestId ||= requestAnimationFrame(() => {
      this.frameRequestId = 0;
      if (this.staleAxes.size > 0) this.drawNow(new Set(this.staleAxes));
    });
  }

  /** Redraw views immediately. */
  drawNow(axes = new Set(AXES)) {
    const start = performance.now();
    for (const view of this.views) {
      if (axes.has(view.axis)) view.draw();
      else view.moveCrosshair();
    }
    for (const axis of axes) this.staleAxes.delete(axis);
    this.#updateReadout();
    this.planeLoader.scheduleFetch();
    this.dispatchEvent(new Event("draw"));
    this.corner.draw();
    performance.measure("draw", { start });
  }

  #updateReadout() {
    const { image, position } = this.scene.state;
    if (image === null) return;
    const label = this.getVisibleObject(position);
    this.readout.value = `gray ${formatNumber(valueAt(image, position))}${label ? `   object ${label}` : ""}`;
  }

  /** Show the same position, zoom and contrast as another viewer. @param {Viewer} otherViewer */
  follow(otherViewer) {
    const { position, center, contrast, zoom, image } = otherViewer.scene.state;
    const { state } = this.scene;
    if (state.image === null || image === null) return;
    const ownStateText = String([state.position, state.center, state.zoom, state.contrast]);
    if (String([position, center, zoom, contrast]) === ownStateText) return;
    this.scene.set({ position, center, contrast, zoom });
    this.#setScale();
    this.drawNow();
  }

  /** @param {boolean} isEnlarged whether the corner hides the other views */
  #enlargeCorner(isEnlarged) {
    this.grid.classList.toggle("corner-only", isEnlarged);
    this.#layOut();
  }

  /** Distribute the space between the views according to the size of the stack. */
  #layOut() {
    const { image, voxelSize } = this.scene.state;
    if (image === null) return;
    const [z, y, x] = image.shape.map((length, axis) => length * voxelSize[axis]);
    const getFraction = (/** @type {number} */ length) => Math.max(0.26, Math.min(0.6, z / (z + length)));
    const { style } = this.grid;
    style.gridTemplateColumns = `minmax(0, ${100 * (1 - getFraction(x))}fr) minmax(${MIN_CORNER_PIXELS}px, ${100 * getFraction(x)}fr)`;
    style.gridTemplateRows = `minmax(0, ${1 - getFraction(y)}fr) minmax(0, ${getFraction(y)}fr)`;
    if (this.corner.isEnlarged) style.gridTemplateColumns = style.gridTemplateRows = "minmax(0, 1fr)";
    for (const view of this.views) view.resize();
    this.corner.invalidateProjection();
    this.#setScale();
    this.drawNow();
  }

  /** Set the scale from the size of the views and the zoom. */
  #setScale() {
    const { image, voxelSize, zoom } = this.scene.state;
    if (image === null) return;
    const [z, y, x] = image.shape.map((length, axis) => length * voxelSize[axis]);
    const [xy, xz, zy] = this.views.map((view) => view.stage);
    const fitScale = Math.min(xy.clientWidth / x, xy.clientHeight / y, zy.clientWidth / z, xz.clientHeight / z);
    this.scene.set({ scale: Math.max(fitScale * 0.97 * zoom, 1e-9) });
  }

  /** Go to a point in the projection. @param {number} y @param {number} x fractions of the size of the projection */
  #goToProjectedPoint(y, x) {
    const { image, position } = this.scene.state;
    if (image === null) return;
    const [, rows, columns] = image.shape;
    this.#goToVoxel([position[0], clamp(Math.floor(y * rows), rows), clamp(Math.floor(x * columns), columns)]);
  }

  /** Go to a voxel, and move the views if the voxel is not visible. @param {Triple} position */
  #goToVoxel(position) {
    const center = /** @type {Triple} */ ([...this.scene.state.center]);
    for (const view of this.views.slice(0, 2)) {
      const placement = view.getPlacement();
      const x = placement.left + position[2] * placement.scaleX;
      if (x < 0 || x > view.stage.clientWidth) center[2] = position[2];
      const verticalAxis = view.axis === 0 ? 1 : 0;
      const y = placement.top + position[verticalAxis] * placement.scaleY;
      if (y < 0 || y > view.stage.clientHeight) center[verticalAxis] = position[verticalAxis];
    }
    this.scene.set(String(center) === String(this.scene.state.center) ? { position } : { position, center });
  }
}
