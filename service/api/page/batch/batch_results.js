/** Files with the results of all stacks of a batch: one table, one report, and one archive. */

import { downloadBlob, element, formatMessage } from "../core/elements.js";
import { formatCount, formatNumber } from "../core/format.js";
import { Problem, request } from "../core/requests.js";
import { describeSetting, toPageTerms } from "../core/terminology.js";
import { createFilterQuery, loadLimits, loadShownCounts } from "../result/stored_limits.js";
import { countObjects, loadCorrectedResult, loadCorrectionCounts } from "./corrections.js";
import { getPhase, getStem } from "./entries.js";
import { ZipWriter } from "./zip_writer.js";

/** @typedef {import("./batch.js").Batch} Batch */
/** @typedef {import("./entries.js").Entry} Entry */
/** @typedef {(text: string) => void} ShowProgress */

/** Spreadsheets interpret a cell with one of these prefixes as a formula. */
const FORMULA_PATTERN = /^[=+\-@]/;
const REPORT_STYLE = `
body { font: 15px sans-serif; margin: 2em; color: #172026; background: #fff }
table { border-collapse: collapse }
td, th { padding: .4em 1em .4em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #d5dce0 }
img { width: 160px; height: 120px }
small { color: #54616a; display: block; max-width: 50em }
.failed { color: #a3262c }`;

/** Save one table with the objects of all stacks. The first column contains the file. @param {Batch} batch @param {ShowProgress} showProgress */
export async function saveTable(batch, showProgress) {
  const results = await collectResults(batch, showProgress);
  downloadBlob(await joinTables(results), `${batch.fileStem}_objects.csv`);
  showProgress(describeSaved(`${batch.fileStem}_objects.csv`, results));
}

/** Save a report with a picture, the number of objects and the warnings of each stack. @param {Batch} batch @param {ShowProgress} showProgress */
export async function saveReport(batch, showProgress) {
  downloadBlob(createReport(batch, await loadCorrectionCounts()), `${batch.fileStem}_report.html`);
  showProgress(`Saved ${batch.fileStem}_report.html`);
}

/** Save an archive with the labels of all stacks, the table and the report. @param {Batch} batch @param {ShowProgress} showProgress */
export async function saveArchive(batch, showProgress) {
  const archive = new ZipWriter();
  const results = await collectResults(batch, showProgress);
  const paths = makeLabelPaths(results);
  for (const [index, { labels }] of results.entries()) {
    showProgress(`Collecting the labels: ${index + 1} of ${results.length}`);
    const blob = await labels();
    if (blob) await archive.add(paths[index], blob);
  }
  await archive.add("objects.csv", await joinTables(results));
  await archive.add("report.html", createReport(batch, await loadCorrectionCounts()));
  downloadBlob(archive.finish(), `${batch.fileStem}_labels.zip`);
  batch.dispatchEvent(new Event("change"));
  showProgress(describeSaved(`${batch.fileStem}_labels.zip`, results));
}

/**
 * Result of an entry, which the files contain.
 * @typedef {object} EntryResult
 * @property {Entry} entry
 * @property {number} corrections number of corrections
 * @property {boolean} isCorrected whether the files contain the corrections
 * @property {Blob | null} table null if the result has no table, or if the service no longer stores the result
 * @property {() => Promise<Blob | null>} labels null if the service no longer stores the result
 */

/** Fetch the tables of all results, with the corrections that this browser stores. @param {Batch} batch @param {ShowProgress} showProgress @returns {Promise<EntryResult[]>} */
async function collectResults(batch, showProgress) {
  const correctionCounts = await loadCorrectionCounts();
  const entries = listDone(batch);
  const results = [];
  for (const [index, entry] of entries.entries()) {
    showProgress(`Collecting the tables: ${index + 1} of ${entries.length}`);
    const corrections = correctionCounts.get(entry.job)?.corrections ?? 0;
    const corrected =
      corrections > 0 ? await loadCorrectedResult(entry, (mediaType) => fetchResult(entry, mediaType, "")) : null;
    // The limits refer to the table of objects.
    const hasTable = entry.report?.parameters.measurements === "zip";
    const query = hasTable ? createFilterQuery(loadLimits(entry.job)) : "";
    results.push({
      entry,
      corrections,
      isCorrected: corrected !== null,
      table: corrected?.table ?? (hasTable ? await fetchResult(entry, "text/csv", query) : null),
      labels: async () => corrected?.labels ?? fetchResult(entry, "image/tiff", query),
    });
  }
  return results;
}

/** Describe a saved file, and name the stacks whose results are filtered, corrected or missing. @param {string} name @param {EntryResult[]} results */
function describeSaved(name, results) {
  const shownCounts = loadShownCounts();
  const listPaths = (/** @type {(result: EntryResult) => boolean} */ isListed) =>
    results
      .filter(isListed)
      .map(({ entry }) => entry.path)
      .join(", ");
  const filtered = listPaths(({ entry }) => shownCounts.has(entry.job));
  const corrected = listPaths(({ isCorrected }) => isCorrected);
  const uncorrected = listPaths(({ corrections, isCorrected }) => corrections > 0 && !isCorrected);
  const missing = listPaths(({ entry }) => entry.isGone);
  return [
    `Saved ${name}.`,
    filtered && `The filters that you set for ${filtered} were applied.`,
    corrected && `It contains your corrections of ${corrected}.`,
    uncorrected && `It does not contain your corrections of ${uncorrected}. Open the result to export them.`,
    missing && `The service no longer stores the results of ${missing}.`,
  ]
    .filter(Boolean)
    .join(" ");
}

/** @param {Batch} batch @returns {Entry[]} the entries with a result */
export function listDone(batch) {
  return batch.stacks.filter((entry) => getPhase(entry) === "done");
}

/** Return a different path for the labels of each stack. @param {EntryResult[]} results */
function makeLabelPaths(results) {
  const stems = results.map(({ entry }) => getStem(entry.path));
  return results.map(({ entry: { path, report, inspection }, isCorrected }, index) => {
    const isUnique = stems.filter((stem) => stem === stems[index]).length === 1;
    const output = isCorrected ? "corrected" : String(report?.parameters.output ?? inspection?.output ?? "labels");
    return `labels/${isUnique ? stems[index] : path}_${output}.ome.tif`;
  });
}

/** Fetch a result. If the service no longer stores it, mark the entry. @param {Entry} entry @param {string} mediaType @param {string} query selects the objects @returns {Promise<Blob | null>} null if the service no longer stores the result */
async function fetchResult(entry, mediaType, query) {
  try {
    const url = `jobs/${entry.job}/result${query && "?"}${query}`;
    return await (await request(url, { headers: { Accept: mediaType } })).blob();
  } catch (error) {
    if (!(error instanceof Problem) || ![404, 410].includes(error.status)) throw error;
    entry.isGone = true;
    return null;
  }
}

/** Join the tables of all stacks. The columns depend on the channels and time points of a stack; missing cells are empty. @param {EntryResult[]} results @returns {Promise<Blob>} CSV */
async function joinTables(results) {
  const tables = [];
  for (const { entry, table } of results)
    if (table) tables.push({ path: entry.path, blob: table, columns: await readColumns(table) });
  const columns = [...new Set(tables.flatMap((table) => table.columns))];
  const parts = [new Blob([`${["stack", ...columns].join()}\n`])];
  for (const table of tables) parts.push(await convertTable(table, columns));
  return new Blob(parts, { type: "text/csv" });
}

/** @param {Blob} blob CSV @returns {Promise<string[]>} */
async function readColumns(blob) {
  const [header] = (await blob.slice(0, 10_000).text()).split("\n", 1);
  return header ? header.split(",") : [];
}

/** Add the file as the first column, and move the other cells to their columns. @param {{path: string, blob: Blob, columns: string[]}} table @param {string[]} columns of the joined table */
async function convertTable({ path, blob, columns: ownColumns }, columns) {
  const positions = columns.map((name) => ownColumns.indexOf(name));
  const fileCell = formatCell(path);
  const lines = (await blob.text()).trimEnd().split("\n").slice(1);
  const rows = lines.map((line) => {
    const cells = line.split(",");
    return `${fileCell},${positions.map((position) => cells[position] ?? "").join()}\n`;
  });
  return new Blob([rows.join("")]);
}

/** @param {string} text @returns {string} a cell of a CSV table on one line */
function formatCell(text) {
  const cell = FORMULA_PATTERN.test(text) ? `./${text}` : text;
  return /[",\r\n]/.test(cell) ? `"${cell.replaceAll('"', '""').replaceAll(/[\r\n]/g, " ")}"` : cell;
}

/** @param {Batch} batch @param {import("./corrections.js").CorrectionCounts} correctionCounts @returns {Blob} HTML */
function createReport(batch, correctionCounts) {
  const { model: _, ...parameters } = /** @type {Record<string, string>} */ ({ ...batch.parameters, ...batch.shared });
  const settings = Object.entries(parameters).flatMap(([name, value]) => (value ? [describeSetting(name, value)] : []));
  const models = [...new Set(listDone(batch).map(({ report }) => report?.model ?? ""))];
  const headers = ["", "Stack", "Objects", "Confidence", "Notes"].map((text) => element("th", { scope: "col" }, text));
  const body = element(
    "div",
    {},
    element("h1", {}, `${listDone(batch).length} of ${formatCount(batch.stacks.length, "stack")}, ${batch.name}`),
    element(
      "p",
      {},
      `Model: ${models.join(", ") || "none"}. ${settings.length ? `Settings: ${settings.join(", ")}.` : ""}`,
    ),
    element("p", {}, new Date().toLocaleString("en", { dateStyle: "long", timeStyle: "short" })),
    element(
      "table",
      {},
      element("tr", {}, ...headers),
      ...batch.entries.map((entry) => createReportRow(entry, correctionCounts)),
    ),
  );
  const head = `<meta charset="utf-8"><title>StackSeg: ${formatCount(batch.stacks.length, "stack")}</title><style>${REPORT_STYLE}</style>`;
  return new Blob([`<!DOCTYPE html><html lang="en"><head>${head}</head><body>${body.innerHTML}</body></html>\n`], {
    type: "text/html",
  });
}

/** @param {Entry} entry @param {import("./corrections.js").CorrectionCounts} correctionCounts */
function createReportRow(entry, correctionCounts) {
  const { path, thumbnail, report, inspection, parameters } = entry;
  const isDone = getPhase(entry) === "done";
  const ownSettings = Object.entries(parameters).map(([name, value]) => describeSetting(name, value));
  const warnings = isDone ? (report?.warnings ?? []) : [];
  // Some notes about the file are also notes about the result.
  const notes = new Set([...warnings, ...(inspection?.file.notes ?? [])].map(toPageTerms));
  return element(
    "tr",
    {},
    element("td", {}, thumbnail !== "" && element("img", { src: thumbnail, alt: "" })),
    element("td", {}, path, ownSettings.length > 0 && element("small", {}, ownSettings.join(", "))),
    element("td", {}, isDone ? formatObjectCount(entry, correctionCounts) : ""),
    element("td", {}, isDone ? formatConfidence(report?.confidence ?? null) : ""),
    element(
      "td",
      {},
      !isDone && element("span", { class: "failed" }, formatMessage(describeMissingResult(entry))),
      ...[...notes].map((note) => element("small", {}, formatMessage(note))),
    ),
  );
}

/** @param {Entry} entry @param {import("./corrections.js").CorrectionCounts} correctionCounts @returns {string} number of displayed objects, which the files contain */
function formatObjectCount(entry, correctionCounts) {
  const { shown, total, isOutdated } = countObjects(entry, correctionCounts);
  const countText = shown === total ? formatNumber(shown) : `${formatNumber(shown)} of ${formatNumber(total ?? NaN)}`;
  const corrections = correctionCounts.get(entry.job)?.corrections;
  if (!corrections) return countText;
  return `${countText}${isOutdated ? " before" : ", with"} ${formatCount(corrections, "correction")}`;
}

/** @param {number | null} confidence from 0 to 1 @returns {string} */
export function formatConfidence(confidence) {
  return confidence === null ? "" : `${Math.round(100 * confidence)}%`;
}

/** @param {Entry} entry @returns {string} why an entry has no result */
export function describeMissingResult(entry) {
  /** @type {Partial<Record<import("./entries.js").Phase, string>>} */
  const texts = {
    skipped: entry.skipReason,
    problem: entry.problem?.message,
    question: describeQuestion(entry),
    failed: toPageTerms(entry.report?.problem?.detail ?? "The segmentation failed."),
    cancelled: "Canceled.",
    expired: "The service has deleted this result to make room for newer ones.",
    gone: "The service no longer stores this job.",
    missing: "This file was not uploaded before the page was closed. Choose it again.",
  };
  return texts[getPhase(entry)] ?? "Not segmented.";
}

/** @param {Entry} entry @returns {string} the setting that a stack needs before it can be segmented */
function describeQuestion({ problem, inspection }) {
  if (problem) return problem.slug === "ambiguous-axes" ? "The file does not specify its axes." : problem.message;
  if (inspection === null) return "";
  const { file } = inspection;
  if (file.example_scene !== null) return `The file has ${file.scenes.length} images. Select one.`;
  if (file.times > 1 && !file.time_points) return "The file is a time series. Select the time points.";
  if (file.channels.length > 1) return "Select the channel to segment.";
  return toPageTerms(inspection.problem ?? "");
}
