/** Advice on a result: which suggestions have not been tried yet, and which result of the stack has the highest confidence. */

import { requestJson } from "../core/requests.js";
import { describeSetting } from "../core/terminology.js";

/** @typedef {import("openapi").JobReport} Job */
/** @typedef {{parameter: string, value: string}} Suggestion a parameter to try, and its value */

const MAX_JOBS = 200;
/** Parameters that select the segmented part of the stack. Results are compared only if these are equal. */
const INPUT_PARAMETERS = ["scene", "channel", "time", "axes"];
/** Minimum difference between the log odds of two confidences for which the better result is recommended. */
const MIN_LOG_ODDS_DIFFERENCE = 0.5;
/** Two diameters whose ratio is at most this factor give almost the same result. */
const MAX_DIAMETER_RATIO = 1.1;
const MIN_CONFIDENCE = 1e-4;

/** Fetch the results of a stack, newest first, including those of other browsers with the same API key. @param {string} stack id @param {AbortSignal} signal @returns {Promise<Job[]>} */
export async function fetchResults(stack, signal) {
  /** @type {{jobs: Job[]}} */
  const { jobs } = await requestJson(`jobs?limit=${MAX_JOBS}`, { signal });
  return jobs.filter((job) => job.parameters.stack === stack && ["done", "expired"].includes(job.state));
}

/** Return the suggestion of the service for the next request, or null. @param {Job} job @returns {Suggestion | null} */
export function getSuggestion({ doubt }) {
  const text = String(doubt?.try ?? "");
  const separator = text.indexOf("=");
  return separator < 0 ? null : { parameter: text.slice(0, separator), value: text.slice(separator + 1) };
}

/** @param {Suggestion} suggestion @returns {string} text of the button that follows it */
export function describeSuggestion({ parameter, value }) {
  return parameter === "model" ? `Try the model ${value}` : `Try ${describeSetting(parameter, value)}`;
}

/** Find the result for which the suggestion of another result was followed. @param {Job} job with the suggestion @param {Suggestion} suggestion @param {Job[]} results of the stack */
export function findTriedResult(job, { parameter, value }, results) {
  return results.find((result) => {
    if (result.id === job.id || !hasSameInput(job, result)) return false;
    if (parameter === "model") return getModelName(result) === value;
    if (getModelName(result) !== getModelName(job)) return false;
    return parameter === "diameter" ? hasDiameter(result, value) : String(result.parameters[parameter]) === value;
  });
}

/** Find the result of the stack whose confidence is clearly higher than that of this result, and highest of all. @param {Job} job @param {Job[]} results of the stack */
export function findBetterResult(job, results) {
  const confidence = getConfidence(job);
  if (confidence === null) return undefined;
  const candidates = results.filter((result) => result.state === "done" && hasSameInput(job, result));
  const best = candidates.reduce((first, second) => (compareConfidence(second, first) > 0 ? second : first), job);
  return computeLogOdds(getConfidence(best) ?? 0) - computeLogOdds(confidence) >= MIN_LOG_ODDS_DIFFERENCE
    ? best
    : undefined;
}

/** Find the models all of whose results of a part of the stack have low confidence. @param {Job[]} results of the stack @param {Record<string, string>} parameters that select the part @returns {string[]} names */
export function findDoubtedModels(results, parameters) {
  const comparable = results.filter((result) => result.state === "done" && selectsSameInput(parameters, result));
  const clear = comparable.filter(({ doubt }) => !doubt).map(getModelName);
  return [...new Set(comparable.map(getModelName))].filter((model) => !clear.includes(model));
}

/** Return the number of results with which this result can be compared, including itself. @param {Job} job @param {Job[]} results of the stack */
export function countComparableResults(job, results) {
  return results.filter((result) => hasSameInput(job, result) && getConfidence(result) !== null).length;
}

/** Describe the model and the settings of a result. @param {Job} job */
export function describeSettings(job) {
  const { model: _model, stack: _stack, measurements: _measurements, ...parameters } = job.parameters;
  const settings = Object.entries(parameters).filter(([name]) => !INPUT_PARAMETERS.includes(name));
  return [getModelName(job), ...settings.map(([name, value]) => describeSetting(name, String(value)))].join(", ");
}

/** @param {Job} job @returns {number | null} the confidence, 0 for a result without objects, null if the model does not report a confidence */
export function getConfidence({ confidence, objects, doubt }) {
  return confidence ?? (objects === 0 && doubt ? 0 : null);
}

/** @param {Job} job @returns {string} the confidence as a percentage, "" if it is not known */
export function formatConfidence(job) {
  const confidence = getConfidence(job);
  return confidence === null ? "" : `${Math.round(confidence * 100)}%`;
}

/** @param {Job} first @param {Job} second */
function compareConfidence(first, second) {
  return (getConfidence(first) ?? -1) - (getConfidence(second) ?? -1);
}

/** @param {number} probability */
function computeLogOdds(probability) {
  const clamped = Math.min(Math.max(probability, MIN_CONFIDENCE), 1 - MIN_CONFIDENCE);
  return Math.log(clamped / (1 - clamped));
}

/** @param {Job} first @param {Job} second @returns {boolean} whether two jobs have segmented the same scene, channel and time points */
function hasSameInput(first, second) {
  return selectsSameInput(first.parameters, second);
}

/** @param {Record<string, unknown>} parameters @param {Job} job @returns {boolean} whether the parameters select the scene, channel and time points that a job has segmented */
function selectsSameInput(parameters, job) {
  return INPUT_PARAMETERS.every((name) => String(parameters[name] ?? "") === String(job.parameters[name] ?? ""));
}

/** @param {Job} job @returns {string} the name without the version */
function getModelName({ model }) {
  return model.split("/")[0];
}

/** @param {Job} job @param {string} diameter in the format of the parameter @returns {boolean} whether the job used this diameter, specified or estimated */
function hasDiameter(job, diameter) {
  if (job.parameters.diameter === diameter) return true;
  const [used, wanted] = [job.diameter ?? "", diameter].map(parseDiameter);
  if (used === null || wanted === null || used.unit !== wanted.unit) return false;
  return Math.abs(Math.log(used.length / wanted.length)) <= Math.log(MAX_DIAMETER_RATIO);
}

/** Parse a diameter such as `4px`, `2.1,6,6px; estimated` or `6.5um`. @param {string} text @returns {{length: number, unit: string} | null} the geometric mean along the axes */
function parseDiameter(text) {
  const match = /^([\d.,]+)(px|um)/.exec(text);
  if (!match) return null;
  const lengths = match[1].split(",").map(Number);
  const product = lengths.reduce((result, length) => result * length, 1);
  return { length: product ** (1 / lengths.length), unit: match[2] };
}
