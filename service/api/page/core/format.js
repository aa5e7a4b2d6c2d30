/** Numbers, amounts and times in words. */

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
