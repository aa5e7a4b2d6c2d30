/** The `time` parameter of requests and results: an index, `all`, or a range such as `2:5`. */

/** @param {unknown} time @returns {number} the first time point */
export function firstTime(time) {
  return Number.parseInt(String(time ?? ""), 10) || 0;
}

/** @param {unknown} time @returns {boolean} whether it selects several time points */
export function isRange(time) {
  const text = String(time ?? "");
  return text === "all" || text.includes(":");
}
