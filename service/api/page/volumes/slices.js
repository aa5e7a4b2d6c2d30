/** Planes of volumes as pictures: cutting, grey values, outlines of objects. Nothing here touches the document. */

/** @typedef {import("./planes.js").Volume} Volume */
/** @typedef {import("./planes.js").Numbers} Numbers */
/** @typedef {{data: Numbers, width: number, height: number}} Plane */
/** @typedef {0 | 1 | 2} Axis z, y or x */

/** The axes that go down and to the right in a view along an axis. */
export const ACROSS = /** @type {const} */ ([
  [1, 2],
  [0, 2],
  [1, 0],
]);

/**
 * Cut a plane; one along z is a view into the volume, others are copied.
 * @param {Volume} volume @param {Axis} axis @param {number} at
 * @returns {Plane}
 */
export function cut(volume, axis, at) {
  const [, rows, columns] = volume.shape;
  const [down, right] = ACROSS[axis];
  const width = volume.shape[right];
  const height = volume.shape[down];
  if (axis === 0) return { data: volume.data.subarray(at * rows * columns, (at + 1) * rows * columns), width, height };
  const data = /** @type {Numbers} */ (new /** @type {any} */ (volume.data.constructor)(width * height));
  const source = volume.data;
  // Plane after plane, in which voxels lie close to each other in memory.
  for (let z = 0; z < volume.shape[0]; z += 1) {
    const plane = z * rows * columns;
    if (axis === 1) {
      data.set(source.subarray(plane + at * columns, plane + (at + 1) * columns), z * columns);
      continue;
    }
    let from = plane + at;
    for (let y = 0; y < rows; y += 1, from += columns) data[y * width + z] = source[from];
  }
  return { data, width, height };
}

/** @param {Volume} volume @returns {Plane} the largest value along z */
export function project(volume) {
  const [depth, height, width] = volume.shape;
  const area = height * width;
  const data = volume.data.slice(0, area);
  for (let z = 1; z < depth; z += 1) {
    const offset = z * area;
    for (let place = 0; place < area; place += 1) {
      const value = volume.data[offset + place];
      if (value > data[place]) data[place] = value;
    }
  }
  return { data, width, height };
}

/**
 * The grey values below which lie the given shares of the voxels, from an even sample of them.
 * @param {Numbers} data @param {number[]} shares
 */
export function quantiles(data, shares) {
  const stride = Math.max(1, Math.floor(data.length / 100_000));
  const picked = [];
  for (let place = 0; place < data.length; place += stride) {
    if (Number.isFinite(data[place])) picked.push(data[place]);
  }
  const sorted = Float64Array.from(picked).sort();
  return shares.map((share) => sorted[Math.round(share * (sorted.length - 1))] ?? 0);
}

/** Levels of a colour, ABGR, by the colour. @type {Map<string, Uint32Array>} */
const SHADES = new Map();

/** @param {[number, number, number]} colour @returns {Uint32Array} from black to the colour */
function shadesOf(colour) {
  const name = String(colour);
  const known = SHADES.get(name);
  if (known) return known;
  const shades = Uint32Array.from({ length: 256 }, (_, level) => {
    const [red, green, blue] = colour.map((part) => Math.round((part * level) / 255));
    return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
  });
  SHADES.set(name, shades);
  return shades;
}

/**
 * @param {Plane} plane @param {number} low @param {number} high grey values that become black and white
 * @param {[number, number, number]} colour of white
 */
export function paintGrey(plane, low, high, colour = [255, 255, 255]) {
  const image = new ImageData(plane.width, plane.height);
  const pixels = new Uint32Array(image.data.buffer);
  const shades = shadesOf(colour);
  const scale = 255.999 / Math.max(high - low, 1e-9);
  const { data } = plane;
  for (let place = 0; place < data.length; place += 1) {
    const level = (data[place] - low) * scale;
    pixels[place] = shades[level > 0 ? (level < 255 ? level | 0 : 255) : 0];
  }
  return image;
}

// Of objects that have no colour of their own.
const GREY = 0xffa8a8a8;
// Of 765, over red, green and blue: less looks the same as an outline of one pixel.
const ALIKE = 120;

/** Colours of objects as the label files have them for ImageJ: hues after the golden ratio. Entries are ABGR. */
export const COLOURS = Uint32Array.from({ length: 256 }, (_, entry) => {
  const label = entry - 1;
  if (label < 0) return GREY;
  const hue = (label * 0.618034) % 1;
  const [red, green, blue] = hsv(hue, [1, 0.55, 0.8][label % 3], [1, 0.95, 0.85][label % 3]);
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
});

/** @param {number} id @returns {number} where its colour is among `COLOURS` */
export function entryOf(id) {
  return ((id - 1) % 255) + 1;
}

/** Whether the colours of two objects are hard to tell apart. @param {number} id @param {number} other */
export function lookAlike(id, other) {
  const [one, two] = [COLOURS[entryOf(id)], COLOURS[entryOf(other)]];
  const between = [0, 8, 16].map((shift) => Math.abs(((one >> shift) & 255) - ((two >> shift) & 255)));
  return between.reduce((sum, part) => sum + part, 0) < ALIKE;
}

/** @param {number} id @returns {string} for style sheets */
export function cssColour(id) {
  const colour = COLOURS[entryOf(id)];
  return `rgb(${colour & 255} ${(colour >> 8) & 255} ${(colour >> 16) & 255})`;
}

/** @param {number} hue @param {number} saturation @param {number} value @returns {[number, number, number]} */
function hsv(hue, saturation, value) {
  /** @param {number} n */
  const part = (n) => {
    const k = (n + hue * 6) % 6;
    return Math.round(255 * value * (1 - saturation * Math.max(0, Math.min(k, 4 - k, 1))));
  };
  return [part(5), part(3), part(1)];
}

/** @typedef {{left: number, top: number, scaleX: number, scaleY: number}} Placement of a plane's voxels, in pixels */
/** @typedef {{filled: boolean, selected: number, hidden: Uint8Array | null, entries: Uint8Array | null, thickness: number}} Style entries: for each id that of its colour among `COLOURS`; null: the usual one */

/**
 * Draw outlines at the resolution of the screen, so that they are sharp however large a voxel is.
 * @param {Plane} labels @param {ImageData} image is overwritten @param {Placement} place @param {Style} style
 */
export function paintLabels(labels, image, place, style) {
  const { width, height } = image;
  const pixels = new Uint32Array(image.data.buffer);
  pixels.fill(0);
  const columns = new Int32Array(width);
  for (let x = 0; x < width; x += 1) {
    const u = Math.floor((x + 0.5 - place.left) / place.scaleX);
    columns[x] = u >= 0 && u < labels.width ? u : -1;
  }
  const first = columns.findIndex((u) => u >= 0);
  if (first < 0) return;
  let last = width - 1;
  while (columns[last] < 0) last -= 1;
  // The outline of the chosen object is thicker.
  const [thick, reach] = [style.thickness, style.thickness + 1];
  /** @param {number} y @param {Int32Array} row */
  const look = (y, row) => {
    const v = Math.floor((y + 0.5 - place.top) / place.scaleY);
    if (y < 0 || y >= height || v < 0 || v >= labels.height) return row.fill(0);
    const offset = v * labels.width;
    const { data } = labels;
    const { hidden } = style;
    for (let x = first; x <= last; x += 1) row[x] = data[offset + columns[x]];
    if (hidden !== null) for (let x = first; x <= last; x += 1) if (hidden[row[x]]) row[x] = 0;
    return row;
  };
  const rows = Array.from({ length: 2 * reach + 1 }, () => new Int32Array(width));
  for (let y = 0; y < 2 * reach; y += 1) look(y - reach, rows[y]);
  for (let y = 0; y < height; y += 1) {
    look(y + reach, rows[2 * reach]);
    const [row, above, below] = [rows[reach], rows[reach - thick], rows[reach + thick]];
    paintRow(above, row, below, pixels, y * width, first, last, style);
    if (style.selected && row.includes(style.selected)) paintSelected(rows, pixels, y * width, first, last, style);
    const spare = rows.shift();
    if (spare) rows.push(spare);
  }
}

/**
 * @param {Int32Array} above @param {Int32Array} row @param {Int32Array} below ids
 * @param {Uint32Array} pixels @param {number} offset @param {number} first @param {number} last @param {Style} style
 */
function paintRow(above, row, below, pixels, offset, first, last, style) {
  const { filled, entries, thickness } = style;
  for (let x = first; x <= last; x += 1) {
    const id = row[x];
    if (id === 0) continue;
    // Beyond the ends of a row there is undefined, which is no id.
    const inside = row[x - thickness] === id && row[x + thickness] === id && above[x] === id && below[x] === id;
    if (inside && !filled) continue;
    const colour = COLOURS[entries === null ? ((id - 1) % 255) + 1 : entries[id]];
    pixels[offset + x] = inside ? (colour & 0x00ffffff) | 0x70000000 : colour;
  }
}

/**
 * Paint the chosen object: white around its colour.
 * @param {Int32Array[]} rows of ids, the one that is painted in the middle
 * @param {Uint32Array} pixels @param {number} offset @param {number} first @param {number} last @param {Style} style
 */
function paintSelected(rows, pixels, offset, first, last, { selected, entries }) {
  const reach = rows.length >> 1;
  const row = rows[reach];
  const colour = (COLOURS[entries?.[selected] ?? entryOf(selected)] & 0x00ffffff) | 0x3c000000;
  for (let x = first; x <= last; x += 1) {
    if (row[x] !== selected) continue;
    const along = row[x - reach] === selected && row[x + reach] === selected;
    const inside = along && rows[0][x] === selected && rows[2 * reach][x] === selected;
    pixels[offset + x] = inside ? colour : 0xffffffff;
  }
}
