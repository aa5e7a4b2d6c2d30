/** Time points of requests and results. */

/** @param {unknown} time as a request states it: an index, all, or a range as 2:5 @returns {number} the first time point */
export function firstTime(time) {
  return Number.parseInt(String(time ?? ""), 10) || 0;
}

/** @param {unknown} time @returns {boolean} whether it stands for several time points */
export function isRange(time) {
  const text = String(time ?? "");
  return text === "all" || text.includes(":");
}
