/** Functions that parse the parameter `time` of requests and jobs: an index, `all`, or a range such as `2:5`. */

/** @param {unknown} time @returns {number} the first time point */
export function getFirstTime(time) {
  return Number.parseInt(String(time ?? ""), 10) || 0;
}

/** @param {unknown} time @returns {boolean} whether the parameter selects a time series */
export function isTimeSeries(time) {
  const text = String(time ?? "");
  return text === "all" || text.includes(":");
}
