/** Numbers, counts and what the service says as a reader of this page wants them. */

/** Titles of the page's settings by the names that they have as parameters of the service. @type {Record<string, string>} */
export const SETTINGS = {
  model: "Model",
  channel: "Channel to segment",
  time: "Time point",
  axes: "Axes",
  voxel_size: "Voxel size",
  diameter: "Object diameter",
  threshold: "Threshold of foreground",
  minimum_size: "Smallest object",
  min_confidence: "Least confidence",
  border: "Objects at the border",
  fill_holes: "Holes in objects",
  overlap: "Overlap of windows",
  skip_below: "Skip windows darker than",
};
/** Values that a setting of the page shows in other words. @type {Record<string, string>} */
const VALUES = { "diameter=none": "as sampled", "diameter=auto": "estimated from the stack", "voxel_size=Z,Y,X": "" };
const PARAMETER = new RegExp(`\\b(${Object.keys(SETTINGS).join("|")})=((?:[\\w:-]|[.,](?=\\w))*)`, "g");
const WIDTHS = /([\d.]+),([\d.]+),([\d.]+)(px|um)\b/g;
const LENGTHS = /\b(\d+) x (\d+) x (\d+)\b/g;
const CONFIDENCE = /\(confidence (\d\.\d+)\)/g;

/** @param {string} name of a parameter @param {string} value "" where it has yet to be chosen */
export function setting(name, value) {
  const known = VALUES[`${name}=${value}`] ?? value;
  const shown = name === "voxel_size" && known ? `${known}um` : known;
  return shown ? `${SETTINGS[name] ?? name}: ${widths(shown)}` : (SETTINGS[name] ?? name);
}

/** What the service says, with the page's settings in place of parameters, and lengths along x, y, z. @param {string} text */
export function pageWords(text) {
  const named = text.replace(PARAMETER, (_, name, value) => `“${setting(name, value)}”`);
  return widths(named)
    .replace(LENGTHS, "$3 × $2 × $1")
    .replace(CONFIDENCE, (_, share) => `(confidence ${Math.round(share * 100)} %)`)
    .replace(" (docs/models.md)", "");
}

/** Lengths of the service, which are along z, y, x, in the order and the units of this page. @param {string} text */
export function widths(text) {
  return text
    .replace(WIDTHS, (_, z, y, x, unit) => `${x} × ${y} × ${z}${unit}`)
    .replace(/(\d)px\b/g, "$1 voxels")
    .replace(/(\d)um\b/g, "$1 µm");
}

// `toLocaleString` would make one for every number.
const FORMAT = new Intl.NumberFormat("en", { maximumFractionDigits: 6 });

/** @param {number} value @param {number} [digits] significant digits */
export function number(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  return FORMAT.format(Number.isInteger(value) ? value : Number(value.toPrecision(digits)));
}

/** @param {number} count @param {string} one @param {string} [many] */
export function counted(count, one, many = `${one}s`) {
  return `${number(count)} ${count === 1 ? one : many}`;
}

/** @param {number} bytes */
export function size(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) {
    bytes /= 1000;
    unit += 1;
  }
  return `${number(bytes, unit ? 3 : 6)} ${units[unit]}`;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 90) return counted(Math.round(seconds), "second");
  if (seconds < 5400) return counted(Math.round(seconds / 60), "minute");
  return `${number(seconds / 3600, 2)} hours`;
}

/** @param {string} when ISO 8601 */
export function ago(when) {
  const seconds = (Date.now() - Date.parse(when)) / 1000;
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${counted(Math.round(seconds / 60), "minute")} ago`;
  if (seconds < 86400) return `${counted(Math.round(seconds / 3600), "hour")} ago`;
  return day(when);
}

/** @param {string} when ISO 8601 */
export function day(when) {
  return new Date(when).toLocaleDateString("en", { day: "numeric", month: "short" });
}

/** @param {ArrayLike<number>} values @returns {number} */
export function median(values) {
  const sorted = Float64Array.from(values).sort();
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}
