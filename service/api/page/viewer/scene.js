/** Scene that all views of a stack show: volumes, position, scale, contrast and display options of the objects. */

import { Store } from "../core/store.js";
import { estimateQuantiles } from "../volumes/slices.js";

/** @typedef {import("../volumes/slices.js").Axis} Axis */
/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../volumes/slices.js").Plane} Plane */
/** @typedef {import("../volumes/planes.js").Triple} Triple */

/** @typedef {[number, number, number]} Color red, green, blue */
/**
 * @typedef {object} Layer an image that is displayed in one color
 * @property {Volume | null} image
 * @property {Color} color of the brightest pixels
 * @property {[number, number]} contrast gray values displayed as black and at full brightness
 * @property {[number, number]} range smallest and largest gray value
 */
/** @typedef {Layer & {channel: number}} Overlay another channel, whose brightness is added to the brightness of the image */
/** @typedef {{image: Plane, labels: Plane | null, step: Triple}} FinePlane a plane with a smaller sampling step than the volume */
/** @typedef {FinePlane & {position: number}} PositionedPlane position: index of the plane along its axis */

/**
 * @typedef {object} SceneProperties
 * @property {Overlay[]} overlays
 * @property {number | null} adjustedChannel channel of the overlay whose contrast the sliders set, null for the image
 * @property {Volume | null} labels
 * @property {[PositionedPlane | null, PositionedPlane | null, PositionedPlane | null]} finePlanes for each axis, the displayed plane normal to that axis, at full resolution; null if the plane has not been fetched
 * @property {Triple} voxelSize size of a voxel of `image` in micrometers
 * @property {boolean} isCalibrated whether the voxel size is known; otherwise voxels are displayed as cubes
 * @property {Triple} position the voxel under the crosshair
 * @property {Triple} center the voxel in the center of the views
 * @property {number} zoom 1 if the stack fits in the views
 * @property {number} scale screen pixels per micrometer
 * @property {boolean} isSmooth whether gray values are interpolated
 * @property {boolean} showObjects
 * @property {boolean} fillObjects whether objects are filled
 * @property {number} opacity of the objects
 * @property {number} selectedId id of the selected object, 0 for none
 * @property {Uint8Array | null} hiddenFlags for each id, 1 if the object is hidden; null if no object is hidden
 * @property {Uint8Array | null} colorIndices for each id, the index into `COLORS`; null for the default colors
 */
/** @typedef {Layer & SceneProperties} SceneState */
/** @typedef {Store<SceneState>} Scene */

export const AXES = /** @type {Axis[]} */ ([0, 1, 2]);

/** @returns {Scene} a scene without a stack */
export function createScene() {
  /** @type {SceneState} */
  const state = {
    image: null,
    overlays: [],
    adjustedChannel: null,
    labels: null,
    finePlanes: [null, null, null],
    voxelSize: [1, 1, 1],
    isCalibrated: false,
    position: [0, 0, 0],
    center: [0, 0, 0],
    zoom: 1,
    scale: 1,
    color: [255, 255, 255],
    contrast: [0, 1],
    range: [0, 1],
    isSmooth: true,
    showObjects: true,
    fillObjects: false,
    opacity: 0.9,
    selectedId: 0,
    hiddenFlags: null,
    colorIndices: null,
  };
  return new Store(state);
}

/** @param {SceneState} state @returns {Layer} the layer whose contrast the sliders set */
export function getAdjustedLayer(state) {
  return state.overlays.find(({ channel }) => channel === state.adjustedChannel) ?? state;
}

/** Choose a contrast that ignores a few extreme gray values of a volume. @param {Volume} image @returns {Pick<Layer, "range" | "contrast">} */
export function chooseContrast(image) {
  const [min, low, high, max] = estimateQuantiles(image.data, [0, 0.01, 0.998, 1]);
  return { range: [min, Math.max(max, min + 1e-9)], contrast: [low, Math.max(high, low + 1e-9)] };
}

/** @param {Volume} volume @param {Triple} position @returns {number} the gray value or label at a voxel */
export function valueAt({ data, shape }, position) {
  return data[(position[0] * shape[1] + position[1]) * shape[2] + position[2]];
}

/** Limit an index to the range of an axis. @param {number} value @param {number} length number of voxels along the axis */
export function clamp(value, length) {
  return Math.max(0, Math.min(length - 1, value));
}

/** Return a copy with a new value along one axis. @param {Triple} triple @param {Axis} axis @param {number} value @returns {Triple} */
export function replaceValue(triple, axis, value) {
  return /** @type {Triple} */ (triple.map((current, index) => (index === axis ? value : current)));
}
