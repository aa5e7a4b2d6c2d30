/** Functions that parse the parameter `time` of requests and jobs: an index, `all`, or a range such as `2:5`. The web UI counts time points from 1, like planes. */

/** @param {unknown} time @returns {number} the first time point */
export function getFirstTime(time) {
  return Number.parseInt(String(time ?? ""), 10) || 0;
}

/** @param {unknown} time @returns {boolean} whether the parameter selects a time series */
export function isTimeSeries(time) {
  const text = String(time ?? "");
  return text === "all" || text.includes(":");
}

/** @param {number} time index of a time point @returns {string} its number in the web UI */
export function formatTimePoint(time) {
  return String(time + 1);
}

/** @param {string} time parameter @returns {string} the selected time points in the web UI, such as `3 to 5` for `2:5` */
export function formatTimeParameter(time) {
  const match = /^(\d+)(:)?(\d+)?$/.exec(time);
  if (match === null) return time;
  const [, first, isRange, stop] = match;
  const firstText = formatTimePoint(Number(first));
  if (!isRange) return firstText;
  return stop ? `${firstText} to ${stop}` : `${firstText} to the last`;
}
