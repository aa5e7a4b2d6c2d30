/** Functions that extract planes from volumes, and that draw gray values and the outlines of objects. They do not use the DOM. */

import { COLORS, getColorIndex } from "./label_colors.js";

/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./planes.js").PixelArray} PixelArray */
/** @typedef {{data: PixelArray, width: number, height: number}} Plane */
/** @typedef {0 | 1 | 2} Axis z, y or x */

/** For each axis, the two axes that point down and to the right in the view along that axis. */
export const IN_PLANE_AXES = /** @type {const} */ ([
  [1, 2],
  [0, 2],
  [1, 0],
]);

/** For each axis, the name of the view along that axis, and of its planes. */
export const PLANE_NAMES = /** @type {const} */ (["XY", "XZ", "ZY"]);

/**
 * Extract a plane. A plane normal to z shares the memory of the volume; other planes are copied.
 * @param {Volume} volume @param {Axis} axis normal to the plane @param {number} position index of the plane
 * @returns {Plane}
 */
export function extractPlane(volume, axis, position) {
  const [, rows, columns] = volume.shape;
  const [downAxis, rightAxis] = IN_PLANE_AXES[axis];
  const width = volume.shape[rightAxis];
  const height = volume.shape[downAxis];
  if (axis === 0)
    return { data: volume.data.subarray(position * rows * columns, (position + 1) * rows * columns), width, height };
  const data = /** @type {PixelArray} */ (new /** @type {any} */ (volume.data.constructor)(width * height));
  const source = volume.data;
  // Traverse the volume in memory order.
  for (let z = 0; z < volume.shape[0]; z += 1) {
    const planeStart = z * rows * columns;
    if (axis === 1) {
      data.set(source.subarray(planeStart + position * columns, planeStart + (position + 1) * columns), z * columns);
      continue;
    }
    let index = planeStart + position;
    for (let y = 0; y < rows; y += 1, index += columns) data[y * width + z] = source[index];
  }
  return { data, width, height };
}

/** @param {Volume} volume @returns {Plane} the maximum projection along z */
export function projectMaximum(volume) {
  const [depth, height, width] = volume.shape;
  const area = height * width;
  const data = volume.data.slice(0, area);
  for (let z = 1; z < depth; z += 1) {
    const offset = z * area;
    for (let index = 0; index < area; index += 1) {
      const value = volume.data[offset + index];
      if (value > data[index]) data[index] = value;
    }
  }
  return { data, width, height };
}

/**
 * Estimate quantiles of the gray values from regularly spaced voxels.
 * @param {PixelArray} data @param {number[]} fractions
 */
export function estimateQuantiles(data, fractions) {
  const stride = Math.max(1, Math.floor(data.length / 100_000));
  const sample = [];
  for (let index = 0; index < data.length; index += stride) {
    if (Number.isFinite(data[index])) sample.push(data[index]);
  }
  const sortedValues = Float64Array.from(sample).sort();
  return fractions.map((fraction) => sortedValues[Math.round(fraction * (sortedValues.length - 1))] ?? 0);
}

/** Shades of each color that was used, as ABGR pixels. @type {Map<string, Uint32Array>} */
const shadesCache = new Map();

/** @param {[number, number, number]} color @returns {Uint32Array} 256 shades from black to the color */
function getShades(color) {
  const key = String(color);
  const cachedShades = shadesCache.get(key);
  if (cachedShades) return cachedShades;
  const shades = Uint32Array.from({ length: 256 }, (_, level) => {
    const [red, green, blue] = color.map((component) => Math.round((component * level) / 255));
    return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
  });
  shadesCache.set(key, shades);
  return shades;
}

/**
 * Convert gray values to an image.
 * @param {Plane} plane @param {number} low gray value displayed as black @param {number} high gray value displayed at full brightness
 * @param {[number, number, number]} color of the brightest pixels
 */
export function paintGray(plane, low, high, color = [255, 255, 255]) {
  const image = new ImageData(plane.width, plane.height);
  const pixels = new Uint32Array(image.data.buffer);
  const shades = getShades(color);
  const scale = 255.999 / Math.max(high - low, 1e-9);
  const { data } = plane;
  for (let index = 0; index < data.length; index += 1) {
    const level = (data[index] - low) * scale;
    pixels[index] = shades[level > 0 ? (level < 255 ? level | 0 : 255) : 0];
  }
  return image;
}

/** @typedef {{left: number, top: number, scaleX: number, scaleY: number}} Placement position of a plane on the screen, and size of its voxels, in pixels */
/** @typedef {{fillObjects: boolean, selectedId: number, hiddenFlags: Uint8Array | null, colorIndices: Uint8Array | null, thickness: number}} LabelStyle hiddenFlags and colorIndices: as in `SceneState`; thickness: width of the outlines in pixels */

/**
 * Draw the outlines of objects at the resolution of the screen, so that the outlines are sharp at any zoom.
 * @param {Plane} labels @param {ImageData} image overwritten @param {Placement} placement @param {LabelStyle} style
 */
export function paintLabels(labels, image, placement, style) {
  const { width, height } = image;
  const pixels = new Uint32Array(image.data.buffer);
  pixels.fill(0);
  const columns = new Int32Array(width);
  for (let x = 0; x < width; x += 1) {
    const u = Math.floor((x + 0.5 - placement.left) / placement.scaleX);
    columns[x] = u >= 0 && u < labels.width ? u : -1;
  }
  const first = columns.findIndex((u) => u >= 0);
  if (first < 0) return;
  let last = width - 1;
  while (columns[last] < 0) last -= 1;
  const { thickness } = style;
  // The outline of the selected object is one pixel thicker.
  const reach = thickness + 1;
  /** @param {number} y @param {Int32Array} row */
  const readRow = (y, row) => {
    const v = Math.floor((y + 0.5 - placement.top) / placement.scaleY);
    if (y < 0 || y >= height || v < 0 || v >= labels.height) return row.fill(0);
    const offset = v * labels.width;
    const { data } = labels;
    const { hiddenFlags } = style;
    for (let x = first; x <= last; x += 1) row[x] = data[offset + columns[x]];
    if (hiddenFlags !== null) for (let x = first; x <= last; x += 1) if (hiddenFlags[row[x]]) row[x] = 0;
    return row;
  };
  const rows = Array.from({ length: 2 * reach + 1 }, () => new Int32Array(width));
  for (let y = 0; y < 2 * reach; y += 1) readRow(y - reach, rows[y]);
  for (let y = 0; y < height; y += 1) {
    readRow(y + reach, rows[2 * reach]);
    const [row, rowAbove, rowBelow] = [rows[reach], rows[reach - thickness], rows[reach + thickness]];
    paintRow(rowAbove, row, rowBelow, pixels, y * width, first, last, style);
    if (style.selectedId && row.includes(style.selectedId))
      paintSelectedObject(rows, pixels, y * width, first, last, style);
    const recycledRow = rows.shift();
    if (recycledRow) rows.push(recycledRow);
  }
}

/**
 * Paint the outlines and fill colors in one row of pixels.
 * @param {Int32Array} rowAbove @param {Int32Array} row @param {Int32Array} rowBelow ids of the objects in this row and in the rows above and below
 * @param {Uint32Array} pixels @param {number} offset index of the first pixel of the row @param {number} first @param {number} last first and last column to paint @param {LabelStyle} style
 */
function paintRow(rowAbove, row, rowBelow, pixels, offset, first, last, style) {
  const { fillObjects, colorIndices, thickness } = style;
  for (let x = first; x <= last; x += 1) {
    const id = row[x];
    if (id === 0) continue;
    // Outside the row, the value is undefined, which differs from every id.
    const isInside = row[x - thickness] === id && row[x + thickness] === id && rowAbove[x] === id && rowBelow[x] === id;
    if (isInside && !fillObjects) continue;
    const color = COLORS[colorIndices === null ? ((id - 1) % 255) + 1 : colorIndices[id]];
    pixels[offset + x] = isInside ? (color & 0x00ffffff) | 0x70000000 : color;
  }
}

/**
 * Paint the selected object in its color with a white outline.
 * @param {Int32Array[]} rows ids of the objects; the painted row is in the middle
 * @param {Uint32Array} pixels @param {number} offset index of the first pixel of the row @param {number} first @param {number} last first and last column to paint @param {LabelStyle} style
 */
function paintSelectedObject(rows, pixels, offset, first, last, { selectedId, colorIndices }) {
  const reach = rows.length >> 1;
  const row = rows[reach];
  const color = (COLORS[colorIndices?.[selectedId] ?? getColorIndex(selectedId)] & 0x00ffffff) | 0x3c000000;
  for (let x = first; x <= last; x += 1) {
    if (row[x] !== selectedId) continue;
    const isInsideRow = row[x - reach] === selectedId && row[x + reach] === selectedId;
    const isInside = isInsideRow && rows[0][x] === selectedId && rows[2 * reach][x] === selectedId;
    pixels[offset + x] = isInside ? color : 0xffffffff;
  }
}
