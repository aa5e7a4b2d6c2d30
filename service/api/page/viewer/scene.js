/** The scene that all views of a stack show: volumes, position, scale, contrast and the display of the objects. */

import { Store } from "../core/store.js";
import { quantiles } from "../volumes/slices.js";

/** @typedef {import("../volumes/slices.js").Axis} Axis */
/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../volumes/slices.js").Plane} Plane */
/** @typedef {import("../volumes/planes.js").Triple} Triple */

/** @typedef {[number, number, number]} Color red, green, blue */
/**
 * @typedef {object} Layer an image in one color
 * @property {Volume | null} image
 * @property {Color} color of the brightest pixels
 * @property {[number, number]} contrast gray values displayed as black and at full brightness
 * @property {[number, number]} range smallest and largest gray value
 */
/** @typedef {Layer & {channel: number}} Overlay another channel that is added to the image */
/** @typedef {{image: Plane, labels: Plane | null, step: Triple}} FinePlane a plane and its sampling step, finer than that of the volume */
/** @typedef {FinePlane & {position: number}} PositionedPlane */

/**
 * @typedef {object} SceneParts
 * @property {Overlay[]} overlays
 * @property {number | null} adjusted channel of the overlay whose contrast the sliders set, null for the image
 * @property {Volume | null} labels
 * @property {[PositionedPlane | null, PositionedPlane | null, PositionedPlane | null]} finePlanes the displayed plane normal to each axis at full resolution
 * @property {Triple} voxel size of a voxel of `image` in micrometers
 * @property {boolean} isCalibrated whether the voxel size is known; otherwise voxels are displayed as cubes
 * @property {Triple} position the voxel under the crosshair
 * @property {Triple} center the voxel in the center of the views
 * @property {number} zoom relative to the scale at which the stack fits into the views
 * @property {number} scale screen pixels per micrometer
 * @property {boolean} smooth whether gray values are interpolated
 * @property {boolean} showObjects
 * @property {boolean} filled whether objects are filled
 * @property {number} opacity of the objects
 * @property {number} selected id of the selected object, 0 for none
 * @property {Uint8Array | null} hidden 1 for hidden objects, by id
 * @property {Uint8Array | null} colorIndices index into `COLORS` by id, null for the default colors
 */
/** @typedef {Layer & SceneParts} SceneState */
/** @typedef {Store<SceneState>} Scene */

export const AXES = /** @type {Axis[]} */ ([0, 1, 2]);

/** @returns {Scene} a scene without a stack */
export function createScene() {
  /** @type {SceneState} */
  const state = {
    image: null,
    overlays: [],
    adjusted: null,
    labels: null,
    finePlanes: [null, null, null],
    voxel: [1, 1, 1],
    isCalibrated: false,
    position: [0, 0, 0],
    center: [0, 0, 0],
    zoom: 1,
    scale: 1,
    color: [255, 255, 255],
    contrast: [0, 1],
    range: [0, 1],
    smooth: true,
    showObjects: true,
    filled: false,
    opacity: 0.9,
    selected: 0,
    hidden: null,
    colorIndices: null,
  };
  return new Store(state);
}

/** @param {SceneState} state @returns {Layer} the layer whose contrast the sliders set */
export function adjustedLayer(state) {
  return state.overlays.find(({ channel }) => channel === state.adjusted) ?? state;
}

/** Choose a contrast that ignores the few extreme gray values of a volume. @param {Volume} image @returns {Pick<Layer, "range" | "contrast">} */
export function fitContrast(image) {
  const [min, low, high, max] = quantiles(image.data, [0, 0.01, 0.998, 1]);
  return { range: [min, Math.max(max, min + 1e-9)], contrast: [low, Math.max(high, low + 1e-9)] };
}

/** @param {Volume} volume @param {Triple} position @returns {number} the gray value or label at a voxel */
export function valueAt({ data, shape }, position) {
  return data[(position[0] * shape[1] + position[1]) * shape[2] + position[2]];
}

/** @param {number} value @param {number} length */
export function clamp(value, length) {
  return Math.max(0, Math.min(length - 1, value));
}

/** Return a copy with a new value along one axis. @param {Triple} triple @param {Axis} axis @param {number} value @returns {Triple} */
export function withValue(triple, axis, value) {
  return /** @type {Triple} */ (triple.map((current, index) => (index === axis ? value : current)));
}
