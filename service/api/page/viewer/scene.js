/** What all views of a stack show: volumes, place, scale, contrast and the look of the objects. */

import { Store } from "../core/store.js";
import { quantiles } from "../volumes/slices.js";

/** @typedef {import("../volumes/slices.js").Axis} Axis */
/** @typedef {import("../volumes/planes.js").Volume} Volume */
/** @typedef {import("../volumes/slices.js").Plane} Plane */
/** @typedef {import("../volumes/planes.js").Triple} Triple */

/** @typedef {[number, number, number]} Colour red, green, blue */
/**
 * @typedef {object} Layer grey values in a colour
 * @property {Volume | null} image
 * @property {Colour} colour of what is bright
 * @property {[number, number]} contrast grey values that are black, and as bright as can be
 * @property {[number, number]} range of the grey values
 */
/** @typedef {Layer & {channel: number}} Overlay another channel, which is added to the image */
/** @typedef {{image: Plane, labels: Plane | null, step: Triple}} Sharp a plane, and every how many voxels of the whole it has */
/** @typedef {Sharp & {at: number}} SharpPlane */

/**
 * @typedef {object} SceneParts
 * @property {Overlay[]} overlays
 * @property {number | null} adjusted the overlay whose contrast the sliders set; null: the image
 * @property {Volume | null} labels
 * @property {[SharpPlane | null, SharpPlane | null, SharpPlane | null]} sharp planes across each axis in full resolution
 * @property {Triple} voxel edges of a voxel of `image`, in micrometres
 * @property {boolean} known whether the file states the voxel size; a voxel counts as a cube otherwise
 * @property {Triple} at the voxel under the crosshair
 * @property {Triple} centre voxel in the middle of the views
 * @property {number} zoom 1: the stack fits into the views
 * @property {number} scale pixels of the screen for a micrometre
 * @property {boolean} smooth
 * @property {boolean} shown whether objects are shown
 * @property {boolean} filled
 * @property {number} opacity of the objects
 * @property {number} selected id of the selected object, 0: none
 * @property {Uint8Array | null} hidden for each id whether it is hidden
 * @property {Uint8Array | null} entries for each id that of its colour among `COLOURS`; null: the usual one
 */
/** @typedef {Layer & SceneParts} SceneState */
/** @typedef {Store<SceneState>} Scene */

export const AXES = /** @type {Axis[]} */ ([0, 1, 2]);

/** @returns {Scene} of no stack */
export function createScene() {
  /** @type {SceneState} */
  const state = {
    image: null,
    overlays: [],
    adjusted: null,
    labels: null,
    sharp: [null, null, null],
    voxel: [1, 1, 1],
    known: false,
    at: [0, 0, 0],
    centre: [0, 0, 0],
    zoom: 1,
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
  return new Store(state);
}

/** @param {SceneState} state @returns {Layer} the layer whose contrast the sliders set */
export function adjustedLayer(state) {
  return state.overlays.find(({ channel }) => channel === state.adjusted) ?? state;
}

/** The contrast that fits the grey values of a volume, without the few that are extreme. @param {Volume} image @returns {Pick<Layer, "range" | "contrast">} */
export function fittingContrast(image) {
  const [least, low, high, most] = quantiles(image.data, [0, 0.01, 0.998, 1]);
  return { range: [least, Math.max(most, least + 1e-9)], contrast: [low, Math.max(high, low + 1e-9)] };
}

/** @param {Volume} volume @param {Triple} at @returns {number} the grey value or label there */
export function valueAt({ data, shape }, at) {
  return data[(at[0] * shape[1] + at[1]) * shape[2] + at[2]];
}

/** @param {number} value @param {number} length */
export function clamp(value, length) {
  return Math.max(0, Math.min(length - 1, value));
}

/** A copy with another value along one axis. @param {Triple} triple @param {Axis} axis @param {number} value @returns {Triple} */
export function replaced(triple, axis, value) {
  return /** @type {Triple} */ (triple.map((one, place) => (place === axis ? value : one)));
}
