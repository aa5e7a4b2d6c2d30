/** The part of a stack in which every object is labeled. Training does not use the rest as background. This module does not use the DOM. */

import { IN_PLANE_AXES, PLANE_NAMES } from "./slices.js";

/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./slices.js").Axis} Axis */
/** @typedef {import("./label_edit.js").LabelEditor} LabelEditor */
/** @typedef {{low: Triple, high: Triple}} Box the voxels from `low` to before `high` */
/** @typedef {{axis: Axis, at: number}} MarkedPlane axis: normal to the plane; at: index of the plane along the axis */

/**
 * The region in which every object is labeled: the whole stack, a box, some planes (within the box, if there is one), or none, if
 * only some objects are labeled. Unlabeled voxels outside the region are unknown.
 * @typedef {{kind: "whole" | "box" | "planes" | "objects", box: Box | null, planes: MarkedPlane[]}} Region
 */

/** Margin around the objects if only some objects are labeled, as a fraction of the extent of the largest object. */
const OBJECT_MARGIN = 0.5;

/** @param {Region["kind"]} kind @returns {Region} */
export function createRegion(kind) {
  return { kind, box: null, planes: [] };
}

/** @param {Triple} shape @returns {Box} */
export function createWholeBox(shape) {
  return { low: [0, 0, 0], high: [...shape] };
}

/** @param {MarkedPlane} plane */
export function describePlane({ axis, at }) {
  return `${PLANE_NAMES[axis]} ${at + 1}`;
}

/** @param {Region} region @param {MarkedPlane} plane @returns {boolean} whether the plane is marked */
export function isMarked({ planes }, { axis, at }) {
  return planes.some((plane) => plane.axis === axis && plane.at === at);
}

/** Mark a plane, or remove its mark. @param {Region} region @param {MarkedPlane} plane @returns {Region} */
export function togglePlane(region, plane) {
  const otherPlanes = region.planes.filter(({ axis, at }) => axis !== plane.axis || at !== plane.at);
  const planes = isMarked(region, plane) ? otherPlanes : [...otherPlanes, plane];
  planes.sort((first, second) => first.axis - second.axis || first.at - second.at);
  return { ...region, kind: "planes", planes };
}

/** @param {Region} region @returns {string} the region in words, such as "the whole stack" */
export function describeRegion({ kind, box, planes }) {
  const boxText = box
    ? ["x", "y", "z"].map((letter, index) => `${letter} ${box.low[2 - index] + 1} to ${box.high[2 - index]}`).join(", ")
    : "";
  if (kind === "whole") return "the whole stack";
  if (kind === "objects") return "only some objects";
  if (kind === "box") return box ? `the box ${boxText}` : "a box";
  const planesText = planes.length
    ? `${planes.length === 1 ? "plane" : "planes"} ${planes.map(describePlane).join(", ")}`
    : "no plane yet";
  return `${planesText}${box ? ` within the box ${boxText}` : ""}`;
}

/**
 * Find out why labels cannot be used for training, and what the user should know before saving them.
 * @param {LabelEditor} editor @param {Region} region @returns {{problem: string, warning: string}} empty strings if there is nothing to report
 */
export function checkAnnotation({ objects, labels }, region) {
  const bounds = findBounds(objects, labels.shape, region);
  const visibleObjects = [...objects.values()].filter(({ low, high }) =>
    low.every((index, axis) => index < bounds.high[axis] && high[axis] > bounds.low[axis]),
  );
  if (region.kind === "box" && region.box === null)
    return { problem: "Draw the box in which every object is labeled, or choose another region.", warning: "" };
  if (region.kind === "planes" && region.planes.length === 0)
    return { problem: "Mark the planes in which every object is labeled, or choose another region.", warning: "" };
  if (visibleObjects.length === 0) return { problem: "The region contains no labeled objects.", warning: "" };
  const axes = labels.shape.flatMap((length, axis) => (length > 1 ? [axis] : []));
  const flatCount = visibleObjects.filter(({ low, high }) => axes.some((axis) => high[axis] - low[axis] === 1)).length;
  const warning =
    2 * flatCount > visibleObjects.length
      ? `${flatCount} of ${visibleObjects.length} objects are labeled in one plane only. The model learns the shape of objects in 3D: label them in the neighboring planes as well, or label the same object in several planes and fill the planes between them.`
      : "";
  return { problem: "", warning };
}

/** Return the smallest box that contains all voxels that are known to the training. @param {LabelEditor["objects"]} objects @param {Triple} shape @param {Region} region @returns {Box} */
function findBounds(objects, shape, { kind, box, planes }) {
  const limits = box && (kind === "box" || kind === "planes") ? box : createWholeBox(shape);
  if (kind === "whole" || kind === "box") return limits;
  const extents = [...objects.values()];
  const getExtreme = (/** @type {number[]} */ values, /** @type {(...values: number[]) => number} */ choose) =>
    values.reduce((extreme, value) => choose(extreme, value), values[0]);
  const bounds = limits.low.map((low, axis) => {
    const high = limits.high[axis];
    // A plane that is not normal to this axis extends over the whole axis.
    if (planes.some((plane) => plane.axis !== axis) && kind === "planes") return [low, high];
    const length = extents.reduce((max, extent) => Math.max(max, extent.high[axis] - extent.low[axis]), 0);
    const margin = kind === "objects" ? Math.ceil(OBJECT_MARGIN * length) : 0;
    const indices = kind === "planes" ? planes.map(({ at }) => at) : [];
    const first = getExtreme([...indices, ...extents.map((extent) => extent.low[axis] - margin)], Math.min);
    const stop = getExtreme(
      [...indices.map((at) => at + 1), ...extents.map((extent) => extent.high[axis] + margin)],
      Math.max,
    );
    return [Math.max(low, first ?? low), Math.min(high, stop ?? high)];
  });
  return {
    low: /** @type {Triple} */ (bounds.map(([low]) => low)),
    high: /** @type {Triple} */ (bounds.map(([, high]) => high)),
  };
}

/**
 * Derive the region from the properties of an annotated stack. The service does not store which planes are marked. They are the
 * planes without unknown voxels.
 * @param {Pick<import("openapi").AnnotationReport, "region" | "ignore_label" | "partial">} report @param {Pick<Volume, "data" | "shape">} labels as stored
 * @returns {Region}
 */
export function decodeRegion({ region, ignore_label: ignoreLabel, partial }, { data, shape }) {
  if (partial) return createRegion("objects");
  const bounds = (region ?? shape.map((length) => `0:${length}`).join(",")).split(",").map((part) => part.split(":"));
  const low = /** @type {Triple} */ (bounds.map(([first]) => Number(first)));
  const high = /** @type {Triple} */ (bounds.map(([, stop]) => Number(stop)));
  const boxRegion = /** @type {Region} */ ({ kind: "box", box: { low, high }, planes: [] });
  if (ignoreLabel === null) return region === null ? createRegion("whole") : boxRegion;
  if (!data.includes(ignoreLabel)) return boxRegion;
  const planes = findKnownPlanes({ data, shape }, { low, high }, ignoreLabel);
  // The extent along the normal of all marked planes follows from the planes and the objects. Only a box limits the other axes.
  const box = createWholeBox(shape);
  for (const axis of [0, 1, 2]) {
    if (planes.every((plane) => plane.axis === axis)) continue;
    box.low[axis] = low[axis];
    box.high[axis] = high[axis];
  }
  const isWhole = box.low.every((index, axis) => index === 0 && box.high[axis] === shape[axis]);
  return { kind: "planes", box: isWhole ? null : box, planes };
}

/** List the planes of a box that contain no unknown voxel. @param {Pick<Volume, "data" | "shape">} labels @param {Box} box @param {number} ignoreLabel label of unknown voxels @returns {MarkedPlane[]} */
function findKnownPlanes({ data, shape }, { low, high }, ignoreLabel) {
  const hasUnknown = shape.map((length) => new Uint8Array(length));
  for (let z = low[0]; z < high[0]; z += 1)
    for (let y = low[1]; y < high[1]; y += 1) {
      const row = (z * shape[1] + y) * shape[2];
      for (let x = low[2]; x < high[2]; x += 1)
        if (data[row + x] === ignoreLabel) hasUnknown[0][z] = hasUnknown[1][y] = hasUnknown[2][x] = 1;
    }
  const axes = /** @type {Axis[]} */ ([0, 1, 2]);
  return axes.flatMap((axis) =>
    Array.from({ length: high[axis] - low[axis] }, (_, index) => ({ axis, at: low[axis] + index })).filter(
      ({ at }) => !hasUnknown[axis][at],
    ),
  );
}

/** @typedef {{region: string, ignore_label: number | undefined, partial: boolean | undefined}} RegionQuery parameters of `POST /annotations` */

/** Encode a region as parameters of `POST /annotations`. @param {LabelEditor} editor @param {Region} region @returns {RegionQuery} */
export function encodeRegion({ labels, objects, maxId }, region) {
  const { low, high } = findBounds(objects, labels.shape, region);
  const isWhole = low.every((index, axis) => index === 0 && high[axis] === labels.shape[axis]);
  return {
    region: isWhole ? "" : low.map((index, axis) => `${index}:${high[axis]}`).join(","),
    ignore_label: region.kind === "planes" ? maxId + 1 : undefined,
    partial: region.kind === "objects" || undefined,
  };
}

/**
 * Encode labels and their region for `POST /annotations`. Unlabeled voxels that are in none of the marked planes get the ignore
 * label. The labels of the editor are not changed.
 * @param {LabelEditor} editor @param {Region} region @returns {{labels: Volume, query: RegionQuery}}
 */
export function encodeAnnotation(editor, region) {
  const { labels, objects } = editor;
  const query = encodeRegion(editor, region);
  const { ignore_label: ignoreLabel } = query;
  if (ignoreLabel === undefined) return { labels, query };
  const isWideEnough = ignoreLabel < 2 ** (8 * labels.data.BYTES_PER_ELEMENT);
  const data = isWideEnough ? labels.data.slice() : Uint32Array.from(labels.data);
  markUnknownVoxels({ ...labels, data }, region.planes, findBounds(objects, labels.shape, region), ignoreLabel);
  return { labels: { ...labels, data }, query };
}

/** Label the unlabeled voxels of a box that are in none of the planes. @param {Volume} labels changed in place @param {MarkedPlane[]} planes @param {Box} box @param {number} ignoreLabel */
function markUnknownVoxels({ data, shape }, planes, { low, high }, ignoreLabel) {
  const [isKnownZ, isKnownY, isKnownX] = shape.map((length, axis) => {
    const flags = new Uint8Array(length);
    for (const plane of planes) if (plane.axis === axis) flags[plane.at] = 1;
    return flags;
  });
  for (let z = low[0]; z < high[0]; z += 1) {
    for (let y = low[1]; y < high[1]; y += 1) {
      if (isKnownZ[z] || isKnownY[y]) continue;
      const row = (z * shape[1] + y) * shape[2];
      for (let x = low[2]; x < high[2]; x += 1) if (data[row + x] === 0 && !isKnownX[x]) data[row + x] = ignoreLabel;
    }
  }
}

/**
 * Change a box by dragging in a view. If the drag starts at an edge of the box, the edge moves. Otherwise, the drag sets the
 * extent of the box in the view.
 */
export class BoxDrag {
  /**
   * @param {Box | null} box before the drag @param {Triple} shape of the stack @param {Axis} axis normal to the view
   * @param {[number, number]} start [down, right] voxel coordinates in the view @param {[number, number]} tolerance largest distance to an edge, in voxels down and to the right
   */
  constructor(box, shape, axis, start, tolerance) {
    this.box = box ?? createWholeBox(shape);
    this.shape = shape;
    this.axes = IN_PLANE_AXES[axis];
    this.start = start;
    /** The edges that the drag moves. @type {("low" | "high" | null)[]} */
    this.edges = this.axes.map((boxAxis, index) => {
      const isBeside = this.axes.some((otherAxis, otherIndex) => {
        const distance = Math.max(
          this.box.low[otherAxis] - start[otherIndex],
          start[otherIndex] - this.box.high[otherAxis],
        );
        return otherIndex !== index && distance > tolerance[otherIndex];
      });
      if (isBeside || box === null) return null;
      if (Math.abs(start[index] - this.box.low[boxAxis]) <= tolerance[index]) return "low";
      return Math.abs(start[index] - this.box.high[boxAxis]) <= tolerance[index] ? "high" : null;
    });
  }

  /** @param {[number, number]} end [down, right] voxel coordinates in the view @returns {Box} the box if the drag ended here */
  moveTo(end) {
    const low = /** @type {Triple} */ ([...this.box.low]);
    const high = /** @type {Triple} */ ([...this.box.high]);
    const movesEdge = this.edges.some((edge) => edge !== null);
    for (const [index, axis] of this.axes.entries()) {
      const length = this.shape[axis];
      const edge = this.edges[index];
      if (edge === "low") low[axis] = limit(Math.round(end[index]), 0, high[axis] - 1);
      else if (edge === "high") high[axis] = limit(Math.round(end[index]), low[axis] + 1, length);
      else if (!movesEdge) {
        low[axis] = limit(Math.floor(Math.min(this.start[index], end[index])), 0, length - 1);
        high[axis] = limit(Math.ceil(Math.max(this.start[index], end[index])), low[axis] + 1, length);
      }
    }
    return { low, high };
  }
}

/** @param {number} value @param {number} min @param {number} max */
function limit(value, min, max) {
  return Math.max(min, Math.min(max, value));
}
