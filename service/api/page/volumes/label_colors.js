/** Colors of objects in outlines, in the 3D rendering and in lists. This module does not use the DOM. */

/** ABGR color of objects that have no color of their own. */
const GRAY = 0xffa8a8a8;
/** Colors look the same in one-pixel outlines if the sum of their differences in red, green and blue is less than this distance. */
const SIMILAR_COLOR_DISTANCE = 120;

/** Colors of objects as ABGR pixels, the same as in the label files for ImageJ: hues in steps of the golden ratio. */
export const COLORS = Uint32Array.from({ length: 256 }, (_, colorIndex) => {
  const label = colorIndex - 1;
  if (label < 0) return GRAY;
  const hue = (label * 0.618034) % 1;
  const [red, green, blue] = hsvToRgb(hue, [1, 0.55, 0.8][label % 3], [1, 0.95, 0.85][label % 3]);
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
});

/** @param {number} id @returns {number} index of the object's color in `COLORS` */
export function getColorIndex(id) {
  return ((id - 1) % 255) + 1;
}

/** Return whether the colors of two objects are hard to distinguish. @param {number} id @param {number} otherId */
export function haveSimilarColors(id, otherId) {
  const [first, second] = [COLORS[getColorIndex(id)], COLORS[getColorIndex(otherId)]];
  const differences = [0, 8, 16].map((shift) => Math.abs(((first >> shift) & 255) - ((second >> shift) & 255)));
  return differences.reduce((sum, difference) => sum + difference, 0) < SIMILAR_COLOR_DISTANCE;
}

/** @param {number} id @returns {string} the color of an object in CSS syntax */
export function getCssColor(id) {
  const color = COLORS[getColorIndex(id)];
  return `rgb(${color & 255} ${(color >> 8) & 255} ${(color >> 16) & 255})`;
}

/** Convert a color from HSV to RGB. @param {number} hue @param {number} saturation @param {number} value from 0 to 1 @returns {[number, number, number]} from 0 to 255 */
function hsvToRgb(hue, saturation, value) {
  /** @param {number} n */
  const computeComponent = (n) => {
    const k = (n + hue * 6) % 6;
    return Math.round(255 * value * (1 - saturation * Math.max(0, Math.min(k, 4 - k, 1))));
  };
  return [computeComponent(5), computeComponent(3), computeComponent(1)];
}
