/** One object diameter for all stacks of a batch: the median of the diameters that were estimated for its stacks. */

import { computeMedian } from "../core/format.js";

/** @typedef {import("./entries.js").Entry} Entry */

/** Matches a diameter such as `14.8,26.5,26.5px; estimated`, along z, y and x, or with one length for all. */
const ESTIMATE_PATTERN = /^([\d.]+)(?:,([\d.]+),([\d.]+))?px; estimated/;

/**
 * Return the diameter for all stacks: the median along each axis, in micrometers if the voxel size of each stack is known, otherwise in voxels.
 * @param {Entry[]} stacks @returns {string} in the format of the parameter; "" if fewer than two diameters were estimated, or if only some voxel sizes are known
 */
export function findSharedDiameter(stacks) {
  const estimates = stacks.flatMap(({ report, inspection }) => {
    const match = report?.state === "done" && ESTIMATE_PATTERN.exec(report.diameter ?? "");
    if (!match || !inspection) return [];
    const { voxel_size: size } = inspection.file;
    const [z, y, x] = [match[1], match[2] ?? match[1], match[3] ?? match[1]].map(Number);
    // A diameter with one length has the same extent along all axes in micrometers.
    const depth = match[2] === undefined && size ? (x * size.x) / size.z : z;
    return [size ? [depth * size.z, y * size.y, x * size.x] : [depth, y, x]].map((lengths) => ({ lengths, size }));
  });
  const unitCount = new Set(estimates.map(({ size }) => size === null)).size;
  if (estimates.length < 2 || unitCount !== 1) return "";
  const medians = [0, 1, 2].map((axis) => computeMedian(estimates.map(({ lengths }) => lengths[axis])));
  return `${medians.map((length) => Number(length.toPrecision(3))).join()}${estimates[0].size ? "um" : "px"}`;
}
