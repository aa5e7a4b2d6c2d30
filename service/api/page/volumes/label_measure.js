/** Functions that measure objects in the browser, with the same definitions of the properties as the service. They do not use the DOM. */

/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./planes.js").Triple} Triple */
/** @typedef {import("./object_table.js").Table} Table */

const COLUMNS = [
  ...["label", "num_pixels", "area", "equivalent_diameter_area", "centroid-0", "centroid-1", "centroid-2"],
  ...["bbox-0", "bbox-1", "bbox-2", "bbox-3", "bbox-4", "bbox-5", "intensity_mean", "intensity_max", "touching_border"],
];

/**
 * Measure all objects in one pass over the rows.
 * @param {Volume} labels @param {Volume | null} image with the same shape, null to omit the intensities
 * @param {Iterable<number>} ids of the objects @param {Triple | null} voxelSize in micrometers, null if unknown
 * @returns {Table} the columns that the service writes for one channel
 */
export function measureObjects(labels, image, ids, voxelSize) {
  const sortedIds = Float64Array.from(ids).sort();
  const rowById = new Map([...sortedIds].map((id, row) => [id, row]));
  /** @type {Map<string, Float64Array>} */
  const columns = new Map(COLUMNS.map((name) => [name, new Float64Array(sortedIds.length)]));
  const getColumn = (/** @type {string} */ name) => /** @type {Float64Array} */ (columns.get(name));
  const [voxelCounts, means, maxima] = ["num_pixels", "intensity_mean", "intensity_max"].map(getColumn);
  const centroids = [0, 1, 2].map((axis) => getColumn(`centroid-${axis}`));
  const low = [0, 1, 2].map((axis) => getColumn(`bbox-${axis}`).fill(Infinity));
  const high = [3, 4, 5].map((axis) => getColumn(`bbox-${axis}`));
  getColumn("label").set(sortedIds);
  maxima.fill(-Infinity);
  forEachRun(labels, (id, z, y, x, length, start) => {
    const row = /** @type {number} */ (rowById.get(id));
    voxelCounts[row] += length;
    centroids[0][row] += z * length;
    centroids[1][row] += y * length;
    centroids[2][row] += (x + (length - 1) / 2) * length;
    low[0][row] = Math.min(low[0][row], z);
    low[1][row] = Math.min(low[1][row], y);
    low[2][row] = Math.min(low[2][row], x);
    high[0][row] = Math.max(high[0][row], z + 1);
    high[1][row] = Math.max(high[1][row], y + 1);
    high[2][row] = Math.max(high[2][row], x + length);
    if (image === null) return;
    for (let index = start; index < start + length; index += 1) {
      means[row] += image.data[index];
      if (image.data[index] > maxima[row]) maxima[row] = image.data[index];
    }
  });
  const spacing = voxelSize ?? [1, 1, 1];
  const isThick = labels.shape.map((length) => length > 1);
  for (let row = 0; row < sortedIds.length; row += 1) {
    const voxelCount = voxelCounts[row];
    const volume = voxelCount * spacing[0] * spacing[1] * spacing[2];
    getColumn("area")[row] = volume;
    getColumn("equivalent_diameter_area")[row] = Math.cbrt((6 * volume) / Math.PI);
    means[row] /= voxelCount;
    for (const axis of [0, 1, 2]) centroids[axis][row] *= spacing[axis] / voxelCount;
    const touchesBorder = labels.shape.some(
      (length, axis) => isThick[axis] && (low[axis][row] === 0 || high[axis][row] === length),
    );
    getColumn("touching_border")[row] = Number(touchesBorder);
  }
  if (image === null) for (const name of ["intensity_mean", "intensity_max"]) columns.delete(name);
  return { columns, length: sortedIds.length, unit: voxelSize === null ? "voxel" : "um" };
}

/** Call a function for each run of voxels along x that belong to the same object. @param {Volume} labels @param {(id: number, z: number, y: number, x: number, length: number, start: number) => void} visit */
function forEachRun({ data, shape }, visit) {
  const [, height, width] = shape;
  for (let rowStart = 0; rowStart < data.length; rowStart += width) {
    const [z, y] = [Math.floor(rowStart / (width * height)), (rowStart / width) % height];
    const end = rowStart + width;
    for (let start = rowStart; start < end; ) {
      const id = data[start];
      let stop = start + 1;
      while (stop < end && data[stop] === id) stop += 1;
      if (id) visit(id, z, y, start - rowStart, stop - start, start);
      start = stop;
    }
  }
}

/** Encode a table as CSV with a header line, in the format of the service. @param {Table} table @param {Iterable<number>} [rows] rows to encode, all by default @returns {string} */
export function encodeCsv({ columns, length, unit }, rows = Array(length).keys()) {
  const names = [...columns.keys()];
  const lines = Array.from(rows, (row) => {
    const cells = names.map((name) => {
      const value = columns.get(name)?.[row] ?? 0;
      if (name === "touching_border") return value ? "True" : "False";
      if (Number.isNaN(value)) return "";
      return String(Number(value.toPrecision(9)));
    });
    return [...cells, unit].join(",");
  });
  return `${[[...names, "unit"].join(","), ...lines].join("\n")}\n`;
}
