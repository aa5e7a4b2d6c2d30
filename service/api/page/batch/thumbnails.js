/** Thumbnails of the stacks of a batch: a plane from the middle, with the outlines of the objects once there is a result. */

import { element } from "../core/elements.js";
import { fetchMiddlePlane, makePlaneParameters } from "../volumes/planes.js";
import { estimateQuantiles, extractPlane, paintGray, paintLabels } from "../volumes/slices.js";
import { getFirstTime } from "../volumes/time_points.js";

/** @typedef {import("./entries.js").Entry} Entry */
/** @typedef {import("../volumes/planes.js").Volume} Volume */

const SIZE = { width: 160, height: 120 };
const OUTLINE_STYLE = { fillObjects: false, selectedId: 0, hiddenFlags: null, colorIndices: null, thickness: 1 };

/** @typedef {import("./entries.js").Parameters} Parameters */

/** Return a key that identifies the content of the thumbnail of an entry. Without a stored stack, the thumbnail does not change. @param {Entry} entry @param {Parameters} parameters of the request */
export function getThumbnailKey({ stack, inspection, report, isGone, thumbnailKey }, parameters) {
  if (!inspection || !stack || isGone) return thumbnailKey;
  const { scene, channel, time, axes } = parameters;
  return report?.state === "done" ? report.id : JSON.stringify([stack, scene, channel, time, axes]);
}

/** @param {Entry} entry with an inspection @param {Parameters} parameters of the request @param {AbortSignal} signal @returns {Promise<string>} data URL */
export async function drawThumbnail({ stack, inspection, report }, parameters, signal) {
  if (inspection === null) throw new Error("The stack has not been inspected.");
  const { file } = inspection;
  const isDone = report?.state === "done";
  const requestParameters = isDone ? report.parameters : parameters;
  const time = getFirstTime(requestParameters.time);
  const [, z, y, x] = file.shape;
  const source = {
    url: `stacks/${stack}/planes`,
    parameters: makePlaneParameters(file, requestParameters, time, /** @type {string} */ (requestParameters.channel)),
    fullShape: /** @type {import("../volumes/planes.js").Triple} */ ([z, y, x]),
  };
  const image = await fetchMiddlePlane(source, 2 * SIZE.width, signal);
  const labelSource = { ...source, parameters: { time: isDone && report.time_points ? 0 : undefined } };
  const labels = isDone
    ? await fetchMiddlePlane({ ...labelSource, url: `jobs/${report.id}/planes` }, 2 * SIZE.width, signal)
    : null;
  return paint(image, labels);
}

/** @param {Volume} image of one plane @param {Volume | null} labels of the same plane @returns {string} data URL */
function paint(image, labels) {
  const [low, high] = estimateQuantiles(image.data, [0.01, 0.995]);
  const plane = extractPlane(image, 0, 0);
  const planeCanvas = element("canvas", { width: plane.width, height: plane.height });
  planeCanvas.getContext("2d")?.putImageData(paintGray(plane, low, Math.max(high, low + 1e-9)), 0, 0);
  const canvas = element("canvas", SIZE);
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const scale = Math.max(SIZE.width / plane.width, SIZE.height / plane.height);
  const [left, top] = [(SIZE.width - plane.width * scale) / 2, (SIZE.height - plane.height * scale) / 2];
  context.drawImage(planeCanvas, left, top, plane.width * scale, plane.height * scale);
  if (labels) {
    const outlines = new ImageData(SIZE.width, SIZE.height);
    paintLabels(extractPlane(labels, 0, 0), outlines, { left, top, scaleX: scale, scaleY: scale }, OUTLINE_STYLE);
    const outlineCanvas = element("canvas", SIZE);
    outlineCanvas.getContext("2d")?.putImageData(outlines, 0, 0);
    context.drawImage(outlineCanvas, 0, 0);
  }
  return canvas.toDataURL("image/jpeg", 0.8);
}
