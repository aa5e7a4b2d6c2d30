/** Trials of models on a part of a stack. Each model is run with an ordinary request, so that the result is the same as that of a request for this part. */

import { buildQuery, request, uploadStack } from "../core/requests.js";
import { toPageTerms } from "../core/terminology.js";
import { decodeNpy } from "../volumes/label_files.js";
import { encodeCrop, fetchCrop } from "./crop.js";

/** @typedef {import("../volumes/planes.js").PixelArray} PixelArray */
/** @typedef {import("./crop.js").Box} Box */
/** @typedef {{labels: PixelArray, objects: number | null, confidence: number | null, diameter: string, warning: string}} Outcome objects: null if the labels are classes; diameter: "" if the model has none; warning: "" if the confidence is not low */
/** @typedef {{stack: string, name: string, file: import("openapi").Description, parameters: Record<string, string>, time: number, center: import("./crop.js").Triple}} Source stack: id; time: displayed time point; center: voxel in the middle of the part */
/** @typedef {{id: string, box: Box, pixels: PixelArray}} Part id of the uploaded stack, and the pixels `[Z, Y, X]` of its first channel */

/** Parameters that select a part of the file or describe it. They do not apply to the part that is uploaded. */
const FILE_PARAMETERS = [
  "scene",
  "channel",
  "time",
  "axes",
  "voxel_size",
  "allow_incomplete",
  "link",
  "model",
  "stack",
];

/**
 * Upload a part of a stack.
 * @param {Source} source @param {Box} box @param {AbortSignal} signal @param {(fraction: number) => void} onprogress
 * @returns {Promise<Part>}
 */
export async function uploadPart({ stack, name, file, parameters, time }, box, signal, onprogress) {
  const { channels, channelNames } = await fetchCrop(stack, file, parameters, time, box, signal, onprogress);
  const content = encodeCrop(channels, channelNames, box.shape, file.voxel_size);
  const { id } = await uploadStack(content, `part of ${name}`, () => undefined, signal);
  return { id, box, pixels: channels[0] };
}

/** Delete the uploaded part. @param {Part} part */
export async function deletePart({ id }) {
  // Without this request, the part expires like any other stack.
  await request(`stacks/${id}`, { method: "DELETE" }).catch(() => undefined);
}

/**
 * Segment a part of a stack with one model. Throws a Problem with the reason if the model cannot segment it.
 * @param {Part} part @param {string} model @param {Record<string, string>} parameters of a request for the whole stack @param {AbortSignal} signal cancels the request
 * @returns {Promise<Outcome>}
 */
export async function tryModel({ id }, model, parameters, signal) {
  const options = Object.entries(parameters).filter(([name]) => !FILE_PARAMETERS.includes(name));
  const query = buildQuery({ ...Object.fromEntries(options), model, stack: id });
  const headers = { Accept: "application/x-npy" };
  const response = await request(`segment?${query}`, { method: "POST", headers, signal });
  const getNumber = (/** @type {string} */ name) => {
    const text = response.headers.get(name);
    return text === null ? null : Number(text);
  };
  const warning = response.headers.get("X-StackSeg-Warning");
  return {
    objects: getNumber("X-StackSeg-Objects"),
    confidence: getNumber("X-StackSeg-Confidence"),
    diameter: response.headers.get("X-StackSeg-Diameter") ?? "",
    warning: warning ? toPageTerms(JSON.parse(warning).detail) : "",
    labels: decodeNpy(await response.arrayBuffer()),
  };
}
