/** Functions that fetch volumes in blocks, from the middle outward. Volumes that are too large for the browser are subsampled. */

import { buildQuery, Problem, request } from "../core/requests.js";
import { extractPlane } from "./slices.js";

/** @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | Float32Array} PixelArray */
/** @typedef {[number, number, number]} Triple values along z, y, x */

/**
 * @typedef {object} Volume
 * @property {PixelArray} data values in C order
 * @property {Triple} shape of the fetched data
 * @property {Triple} step sampling step along each axis, in voxels of the full volume
 * @property {Triple} fullShape shape at full resolution
 */

/**
 * The source of planes: a stack or the labels of a job.
 * @typedef {object} Source
 * @property {string} url
 * @property {Record<string, unknown>} parameters scene, channel, time point and axes
 * @property {Triple} fullShape shape at full resolution
 */

const ARRAY_TYPES = {
  uint8: Uint8Array,
  int8: Int8Array,
  uint16: Uint16Array,
  int16: Int16Array,
  uint32: Uint32Array,
  int32: Int32Array,
  float32: Float32Array,
};
/** Maximum size of a volume that is fetched at full resolution. */
const MAX_VOLUME_VOXELS = 24_000_000;
/** Maximum size of a plane that the service sends in one response. */
export const MAX_PLANE_VOXELS = 8_000_000;
/** Approximate number of voxels per request. */
const VOXELS_PER_BLOCK = 2_000_000;
const MAX_CONCURRENT_REQUESTS = 3;
/** Delay before retrying a request that was rejected because of too many concurrent requests. */
const RETRY_DELAY_MILLISECONDS = 500;

/** @param {Triple} fullShape @returns {Triple} the smallest steps at which the volume and its planes are within the limits */
export function chooseStep(fullShape) {
  /** @type {Triple} */
  const step = [1, 1, 1];
  for (;;) {
    const [z, y, x] = getSampledShape(fullShape, step);
    const isPlaneTooLarge = y * x > MAX_PLANE_VOXELS;
    if (!isPlaneTooLarge && z * y * x <= MAX_VOLUME_VOXELS) return step;
    if (isPlaneTooLarge || Math.max(y, x) >= z) {
      step[1] += 1;
      step[2] += 1;
    } else step[0] += 1;
  }
}

/** @param {Triple} fullShape @param {Triple} step @returns {Triple} */
function getSampledShape(fullShape, step) {
  return [Math.ceil(fullShape[0] / step[0]), Math.ceil(fullShape[1] / step[1]), Math.ceil(fullShape[2] / step[2])];
}

/** @param {Triple} shape */
export function countVoxels(shape) {
  return shape[0] * shape[1] * shape[2];
}

/** @param {Triple} fullShape @param {import("./slices.js").Axis} axis @returns {Triple} the smallest steps at which one plane fits in one response */
function choosePlaneStep(fullShape, axis) {
  for (let inPlaneStep = 1; ; inPlaneStep += 1) {
    /** @type {Triple} */
    const step = [inPlaneStep, inPlaneStep, inPlaneStep];
    step[axis] = 1;
    const shape = getSampledShape(fullShape, step);
    shape[axis] = 1;
    if (countVoxels(shape) <= MAX_PLANE_VOXELS) return step;
  }
}

/**
 * Request planes, and retry the request while the service is busy.
 * @param {string} url @param {Record<string, unknown>} query @param {AbortSignal} signal
 * @returns {Promise<{data: PixelArray, volumeShape: Triple}>} volumeShape: shape of the volume that contains the planes
 */
export async function requestPlanes(url, query, signal) {
  for (;;) {
    try {
      const response = await request(`${url}?${buildQuery(query)}`, { signal });
      const dtype = /** @type {keyof typeof ARRAY_TYPES} */ (response.headers.get("X-StackSeg-Dtype"));
      const volumeShape = (response.headers.get("X-StackSeg-Volume") ?? "").split(",").map(Number);
      return {
        data: new ARRAY_TYPES[dtype](await response.arrayBuffer()),
        volumeShape: /** @type {Triple} */ (volumeShape),
      };
    } catch (error) {
      if (!(error instanceof Problem) || error.status !== 429) throw error;
      await new Promise((resolve) => setTimeout(resolve, RETRY_DELAY_MILLISECONDS));
      signal.throwIfAborted();
    }
  }
}

/**
 * Fetch the shape of a volume at full resolution.
 * @param {Omit<Source, "fullShape">} source @param {AbortSignal} signal
 * @returns {Promise<Triple>}
 */
export async function fetchShape({ url, parameters }, signal) {
  const { volumeShape } = await requestPlanes(url, { ...parameters, to: 1, step: "1,9999,9999" }, signal);
  return volumeShape;
}

/**
 * Fetch one plane at the highest resolution that fits in one response.
 * @param {Source} source @param {import("./slices.js").Axis} axis normal to the plane @param {number} position index of the plane along the axis @param {AbortSignal} signal
 * @returns {Promise<{plane: import("./slices.js").Plane, step: Triple}>}
 */
export async function fetchPlane({ url, parameters, fullShape }, axis, position, signal) {
  const step = choosePlaneStep(fullShape, axis);
  const range = { axis: "zyx"[axis], from: position, to: position + 1, step: step.join() };
  const { data } = await requestPlanes(url, { ...parameters, ...range }, signal);
  const shape = getSampledShape(fullShape, step);
  shape[axis] = 1;
  return { plane: extractPlane({ data, shape, step, fullShape }, axis, 0), step };
}

/**
 * Fetch a subsampled plane from the middle of a stack.
 * @param {Source} source @param {number} maxEdge maximum length of the longer edge in voxels @param {AbortSignal} signal
 * @returns {Promise<Volume>}
 */
export async function fetchMiddlePlane({ url, parameters, fullShape }, maxEdge, signal) {
  const inPlaneStep = Math.ceil(Math.max(fullShape[1], fullShape[2]) / maxEdge);
  /** @type {Triple} */
  const step = [1, inPlaneStep, inPlaneStep];
  const from = fullShape[0] >> 1;
  const { data } = await requestPlanes(url, { ...parameters, from, to: from + 1, step: step.join() }, signal);
  const [, rows, columns] = getSampledShape(fullShape, step);
  return { data, shape: [1, rows, columns], step, fullShape };
}

/** @param {string[]} scenes names of the scenes of a file @param {unknown} scene parameter of a request: index or name @returns {number} index of the scene, -1 if the parameter selects no scene */
export function findScene(scenes, scene) {
  const text = String(scene ?? "");
  if (text === "") return -1;
  return /^\d+$/.test(text) && Number(text) < scenes.length ? Number(text) : scenes.indexOf(text);
}

/**
 * Return the request parameters that select the planes of one scene, channel and time point.
 * @param {import("openapi").Description} file @param {Record<string, unknown>} parameters of the request
 * @param {number | string | undefined} time time point, used if the file has more than one @param {number | string | undefined} channel index or name
 */
export function makePlaneParameters(file, parameters, time, channel) {
  const { axes, allow_incomplete } = parameters;
  const scene = file.example_scene ?? findScene(file.scenes, parameters.scene);
  const index = file.channels.indexOf(String(channel ?? ""));
  const timeIndex = file.times > 1 ? (time ?? 0) : undefined;
  return {
    scene: scene >= 0 ? scene : undefined,
    channel: index >= 0 ? index : (channel ?? 0),
    time: timeIndex,
    axes,
    allow_incomplete,
  };
}

/**
 * Fetch a volume. After each block, call `onblock` with the volume and the fetched fraction.
 * @param {Source} source @param {AbortSignal} signal
 * @param {(volume: Volume, fraction: number) => void} onblock
 * @param {Triple} [step] sampling step along each axis
 * @returns {Promise<Volume>}
 */
export async function fetchVolume({ url, parameters, fullShape }, signal, onblock, step = chooseStep(fullShape)) {
  const shape = getSampledShape(fullShape, step);
  const planesPerBlock = Math.max(1, Math.floor(VOXELS_PER_BLOCK / (shape[1] * shape[2])));
  const starts = Array.from({ length: Math.ceil(shape[0] / planesPerBlock) }, (_, block) => block * planesPerBlock);
  const middleStart = shape[0] / 2 - planesPerBlock / 2;
  starts.sort((first, second) => Math.abs(first - middleStart) - Math.abs(second - middleStart));
  /** @type {Volume | null} */
  let volume = null;
  let fetchedBlockCount = 0;
  const blockCount = starts.length;

  async function fetchBlocks() {
    for (let start = starts.shift(); start !== undefined; start = starts.shift()) {
      const range = {
        from: start * step[0],
        to: Math.min((start + planesPerBlock) * step[0], fullShape[0]),
        step: step.join(),
      };
      const { data: block } = await requestPlanes(url, { ...parameters, ...range }, signal);
      const ArrayType = /** @type {any} */ (block.constructor);
      volume ??= { data: /** @type {PixelArray} */ (new ArrayType(countVoxels(shape))), shape, step, fullShape };
      volume.data.set(block, start * shape[1] * shape[2]);
      fetchedBlockCount += 1;
      onblock(volume, fetchedBlockCount / blockCount);
    }
  }

  // Fetch the first block before the others. The service decodes the file for this block, and then serves the other
  // blocks from the decoded file.
  const otherStarts = starts.splice(1);
  await fetchBlocks();
  starts.push(...otherStarts);
  await Promise.all(Array.from({ length: MAX_CONCURRENT_REQUESTS }, fetchBlocks));
  if (volume === null) throw new Error("The volume has no planes.");
  return volume;
}
