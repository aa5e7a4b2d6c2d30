/** Functions that format numbers, counts, sizes and times for display, and a function that computes the median. */

// Created once, because `toLocaleString` creates a new formatter for every number.
const NUMBER_FORMAT = new Intl.NumberFormat("en", { maximumFractionDigits: 6 });

/** @param {number} value @param {number} [digits] number of significant digits if the value is not an integer */
export function formatNumber(value, digits = 3) {
  if (!Number.isFinite(value)) return "–";
  return NUMBER_FORMAT.format(Number.isInteger(value) ? value : Number(value.toPrecision(digits)));
}

/** Format a count with its noun, such as "3 objects". @param {number} count @param {string} singular @param {string} [plural] */
export function formatCount(count, singular, plural = `${singular}s`) {
  return `${formatNumber(count)} ${count === 1 ? singular : plural}`;
}

/** Format a part of a count with its noun, such as "35 of 77 objects", or the whole count. @param {number} part @param {number} count @param {string} singular */
export function formatPart(part, count, singular) {
  return part === count ? formatCount(count, singular) : `${formatNumber(part)} of ${formatCount(count, singular)}`;
}

/** @param {number} bytes */
export function formatBytes(bytes) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unitIndex = 0;
  while (bytes >= 1000 && unitIndex < units.length - 1) {
    bytes /= 1000;
    unitIndex += 1;
  }
  return `${formatNumber(bytes, unitIndex ? 3 : 6)} ${units[unitIndex]}`;
}

/** @param {number} seconds */
export function formatDuration(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 90) return formatCount(Math.round(seconds), "second");
  if (seconds < 5400) return formatCount(Math.round(seconds / 60), "minute");
  return `${formatNumber(seconds / 3600, 2)} hours`;
}

/** Format the time since a date. @param {string} date ISO 8601 */
export function formatAge(date) {
  const seconds = (Date.now() - Date.parse(date)) / 1000;
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${formatCount(Math.round(seconds / 60), "minute")} ago`;
  if (seconds < 86400) return `${formatCount(Math.round(seconds / 3600), "hour")} ago`;
  return formatDate(date);
}

/** @param {string} date ISO 8601 */
export function formatDate(date) {
  return new Date(date).toLocaleDateString("en", { day: "numeric", month: "short" });
}

/** @param {ArrayLike<number>} values @returns {number} */
export function computeMedian(values) {
  const sortedValues = Float64Array.from(values).sort();
  const middle = sortedValues.length >> 1;
  return sortedValues.length % 2 ? sortedValues[middle] : (sortedValues[middle - 1] + sortedValues[middle]) / 2;
}
