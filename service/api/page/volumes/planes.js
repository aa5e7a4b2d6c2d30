/** Fetching of volumes: in blocks from the middle outward, and subsampled if the volume is too large for the browser. */

import { buildQuery, Problem, request } from "../core/requests.js";
import { slice } from "./slices.js";

/** @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | Float32Array} PixelArray */
/** @typedef {[number, number, number]} Triple along z, y, x */

/**
 * @typedef {object} Volume
 * @property {PixelArray} data in C order
 * @property {Triple} shape of the fetched data
 * @property {Triple} step sampling step along each axis, in voxels of the full volume
 * @property {Triple} fullShape shape at full resolution
 */

/**
 * The source of planes: a stack or the labels of a job.
 * @typedef {object} Source
 * @property {string} address
 * @property {Record<string, unknown>} parameters channel, time point and axes
 * @property {Triple} fullShape shape at full resolution
 */

const TYPES = {
  uint8: Uint8Array,
  int8: Int8Array,
  uint16: Uint16Array,
  int16: Int16Array,
  uint32: Uint32Array,
  int32: Int32Array,
  float32: Float32Array,
};
/** Largest volume that is fetched at full resolution. */
const MAX_VOXELS = 24_000_000;
/** Largest plane that the service sends in one response. */
export const MAX_PLANE_VOXELS = 8_000_000;
/** Voxels per request. */
const BLOCK_VOXELS = 2_000_000;
const CONCURRENT_REQUESTS = 3;
/** Delay before a request that the service rejected as one too many is repeated. */
const RETRY_MILLISECONDS = 500;

/** @param {Triple} fullShape @returns {Triple} the smallest steps with which the volume and its planes are within the limits */
export function chooseStep(fullShape) {
  /** @type {Triple} */
  const step = [1, 1, 1];
  for (;;) {
    const [z, y, x] = sampledShape(fullShape, step);
    const isPlaneTooLarge = y * x > MAX_PLANE_VOXELS;
    if (!isPlaneTooLarge && z * y * x <= MAX_VOXELS) return step;
    if (isPlaneTooLarge || Math.max(y, x) >= z) {
      step[1] += 1;
      step[2] += 1;
    } else step[0] += 1;
  }
}

/** @param {Triple} fullShape @param {Triple} step @returns {Triple} */
function sampledShape(fullShape, step) {
  return [Math.ceil(fullShape[0] / step[0]), Math.ceil(fullShape[1] / step[1]), Math.ceil(fullShape[2] / step[2])];
}

/** @param {Triple} shape */
export function countVoxels(shape) {
  return shape[0] * shape[1] * shape[2];
}

/** @param {Triple} fullShape @param {import("./slices.js").Axis} axis @returns {Triple} the smallest steps with which one plane fits into one response */
function choosePlaneStep(fullShape, axis) {
  for (let stride = 1; ; stride += 1) {
    /** @type {Triple} */
    const step = [stride, stride, stride];
    step[axis] = 1;
    const shape = sampledShape(fullShape, step);
    shape[axis] = 1;
    if (countVoxels(shape) <= MAX_PLANE_VOXELS) return step;
  }
}

/**
 * Request planes, and repeat the request while the service is busy.
 * @param {string} address @param {Record<string, unknown>} query @param {AbortSignal} signal
 * @returns {Promise<PixelArray>}
 */
async function requestPlanes(address, query, signal) {
  for (;;) {
    try {
      const response = await request(`${address}?${buildQuery(query)}`, { signal });
      const kind = /** @type {keyof typeof TYPES} */ (response.headers.get("X-StackSeg-Dtype"));
      return new TYPES[kind](await response.arrayBuffer());
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 429) throw error;
      await new Promise((resolve) => setTimeout(resolve, RETRY_MILLISECONDS));
      signal.throwIfAborted();
    }
  }
}

/**
 * Fetch one plane at the highest resolution that fits into one response.
 * @param {Source} source @param {import("./slices.js").Axis} axis normal to the plane @param {number} position voxel along the axis @param {AbortSignal} signal
 * @returns {Promise<{plane: import("./slices.js").Plane, step: Triple}>}
 */
export async function fetchPlane({ address, parameters, fullShape }, axis, position, signal) {
  const step = choosePlaneStep(fullShape, axis);
  const range = { axis: "zyx"[axis], from: position, to: position + 1, step: step.join() };
  const data = await requestPlanes(address, { ...parameters, ...range }, signal);
  const shape = sampledShape(fullShape, step);
  shape[axis] = 1;
  return { plane: slice({ data, shape, step, fullShape }, axis, 0), step };
}

/**
 * Fetch a subsampled plane from the middle of a stack.
 * @param {Source} source @param {number} pixels maximum length of the longer edge @param {AbortSignal} signal
 * @returns {Promise<Volume>}
 */
export async function fetchMiddle({ address, parameters, fullShape }, pixels, signal) {
  const stride = Math.ceil(Math.max(fullShape[1], fullShape[2]) / pixels);
  /** @type {Triple} */
  const step = [1, stride, stride];
  const from = fullShape[0] >> 1;
  const data = await requestPlanes(address, { ...parameters, from, to: from + 1, step: step.join() }, signal);
  const [, rows, columns] = sampledShape(fullShape, step);
  return { data, shape: [1, rows, columns], step, fullShape };
}

/**
 * Return the parameters that select a part of a stack when its planes are fetched.
 * @param {import("openapi").Description} file @param {Record<string, unknown>} parameters of the request
 * @param {number | string | undefined} time point, used if there are several @param {number | string | undefined} channel index or name
 */
export function partOf(file, { axes }, time, channel) {
  const index = file.channels.indexOf(String(channel ?? ""));
  return { channel: index >= 0 ? index : (channel ?? 0), time: file.times > 1 ? (time ?? 0) : undefined, axes };
}

/**
 * Fetch a volume. `onblock` is called with the volume and the fetched fraction after every block.
 * @param {Source} source @param {AbortSignal} signal
 * @param {(volume: Volume, fraction: number) => void} onblock
 * @param {Triple} [step] sampling step along each axis
 * @returns {Promise<Volume>}
 */
export async function fetchVolume({ address, parameters, fullShape }, signal, onblock, step = chooseStep(fullShape)) {
  const shape = sampledShape(fullShape, step);
  const planes = Math.max(1, Math.floor(BLOCK_VOXELS / (shape[1] * shape[2])));
  const starts = Array.from({ length: Math.ceil(shape[0] / planes) }, (_, block) => block * planes);
  const middle = shape[0] / 2 - planes / 2;
  starts.sort((first, second) => Math.abs(first - middle) - Math.abs(second - middle));
  /** @type {Volume | null} */
  let volume = null;
  let done = 0;
  const total = starts.length;

  async function work() {
    for (let start = starts.shift(); start !== undefined; start = starts.shift()) {
      const range = {
        from: start * step[0],
        to: Math.min((start + planes) * step[0], fullShape[0]),
        step: step.join(),
      };
      const block = await requestPlanes(address, { ...parameters, ...range }, signal);
      const kind = /** @type {any} */ (block.constructor);
      volume ??= { data: /** @type {PixelArray} */ (new kind(countVoxels(shape))), shape, step, fullShape };
      volume.data.set(block, start * shape[1] * shape[2]);
      done += 1;
      onblock(volume, done / total);
    }
  }

  // Fetch the first block alone: the service decodes the file for it, and serves the other blocks from the decoded file.
  const others = starts.splice(1);
  await work();
  starts.push(...others);
  await Promise.all(Array.from({ length: CONCURRENT_REQUESTS }, work));
  if (volume === null) throw new Error("The volume has no planes.");
  return volume;
}
