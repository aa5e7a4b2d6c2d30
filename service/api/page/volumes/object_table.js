/** Table of objects with the columns that the service writes. Each column has one number per object. */

import { request } from "../core/requests.js";

/** @typedef {{columns: Map<string, Float64Array>, length: number, unit: string}} Table */

/** Fetch the table of the objects of a result. @param {import("openapi").JobReport} job @param {AbortSignal} signal @returns {Promise<Table | null>} null if the objects were not measured, or if there are none */
export async function fetchTable({ id, parameters }, signal) {
  if (parameters.measurements !== "zip") return null;
  const text = await (await request(`jobs/${id}/result`, { headers: { Accept: "text/csv" }, signal })).text();
  return text ? parseTable(text) : null;
}

/** Parse a table. @param {string} text CSV with a header line @returns {Table} */
export function parseTable(text) {
  const lines = text.trimEnd().split("\n");
  const names = (lines.shift() ?? "").split(",");
  const columns = new Map(names.map((name) => [name, new Float64Array(lines.length)]));
  const arrays = [...columns.values()];
  const unitColumn = names.indexOf("unit");
  lines.forEach((line, row) => {
    const cells = line.split(",");
    for (let column = 0; column < arrays.length; column += 1) {
      const cell = cells[column];
      arrays[column][row] = cell === "True" ? 1 : cell === "False" ? 0 : Number(cell);
    }
  });
  const unit = lines[0]?.split(",")[unitColumn] ?? "um";
  columns.delete("unit");
  return { columns, length: lines.length, unit };
}

/** @param {Table} table @param {string} name @returns {Float64Array} the values of a column, or zeros if the table does not have the column */
export function getColumn(table, name) {
  return table.columns.get(name) ?? new Float64Array(table.length);
}

/** Select rows of a table. @param {Table} table @param {(row: number) => boolean} isSelected @returns {Table} */
export function selectRows({ columns, length, unit }, isSelected) {
  const rows = Array.from({ length }, (_, row) => row).filter(isSelected);
  const selected = [...columns].map(([name, values]) => [name, Float64Array.from(rows, (row) => values[row])]);
  return { columns: new Map(/** @type {[string, Float64Array][]} */ (selected)), length: rows.length, unit };
}

/** Add columns to a table, or replace them. @param {Table} table @param {Record<string, Float64Array>} columns @returns {Table} */
export function addColumns(table, columns) {
  return { ...table, columns: new Map([...table.columns, ...Object.entries(columns)]) };
}

/** Join the rows of tables. Cells of columns that a table lacks are NaN. @param {Table[]} tables in the same unit, at least one @returns {Table} with the columns of the first table first */
export function joinRows(tables) {
  const length = tables.reduce((sum, table) => sum + table.length, 0);
  /** @type {Table["columns"]} */
  const columns = new Map();
  let start = 0;
  for (const table of tables) {
    for (const [name, values] of table.columns) {
      const joined = columns.get(name) ?? new Float64Array(length).fill(Number.NaN);
      joined.set(values, start);
      columns.set(name, joined);
    }
    start += table.length;
  }
  return { columns, length, unit: tables[0].unit };
}

/** @param {Table} table @returns {boolean} whether the confidences are probabilities that the objects are right, and not mean probabilities of voxels */
export function hasCalibratedConfidence(table) {
  const means = getColumn(table, "mean_probability");
  return getColumn(table, "confidence").some(
    (confidence, row) => confidence !== means[row] && !Number.isNaN(confidence),
  );
}

/** @param {Table} table @returns {string | null} the column with the confidence of the objects, null if the model does not report one */
export function getConfidenceColumn(table) {
  const column = hasCalibratedConfidence(table) ? "confidence" : "mean_probability";
  return table.columns.has(column) ? column : null;
}

/**
 * Return the column with the mean intensity of the objects in the segmented channel.
 * @param {Table} table @param {number} channel index of the segmented channel, -1 if unknown @returns {string | null} the column of the first channel if the segmented channel is unknown, null if intensities were not measured
 */
export function getIntensityColumn(table, channel) {
  const names = [...table.columns.keys()].filter((name) => name.startsWith("intensity_mean"));
  return names.find((name) => name === `intensity_mean-${channel}`) ?? names[0] ?? null;
}

/**
 * Add the confidence of the objects that were not corrected to a table of corrected objects, and name the intensities
 * after the segmented channel.
 * @param {Table} correctedTable @param {Table} originalTable @param {Set<number>} editedIds objects that were corrected, whose confidence is unknown
 * @param {number} channel index of the segmented channel, -1 if unknown @returns {Table}
 */
export function completeCorrectedTable(correctedTable, originalTable, editedIds, channel) {
  const columns = new Map(correctedTable.columns);
  const suffix = getIntensityColumn(originalTable, channel)?.slice("intensity_mean".length) ?? "";
  for (const name of suffix ? ["intensity_mean", "intensity_max"] : []) {
    const values = columns.get(name);
    columns.delete(name);
    if (values) columns.set(name + suffix, values);
  }
  const labels = getColumn(correctedTable, "label");
  const rowByLabel = new Map([...getColumn(originalTable, "label")].map((label, row) => [label, row]));
  for (const name of ["mean_probability", "confidence"]) {
    const values = originalTable.columns.get(name);
    if (!values) continue;
    const getValue = (/** @type {number} */ label) =>
      editedIds.has(label) ? Number.NaN : (values[rowByLabel.get(label) ?? -1] ?? Number.NaN);
    columns.set(name, labels.map(getValue));
  }
  return { ...correctedTable, columns };
}

/**
 * Return the indices of the rows within all limits, sorted by a column.
 * @param {Table} table @param {string} sortColumn @param {boolean} isDescending
 * @param {Map<string, [number, number]>} limits smallest and largest value by column; rows without a value are within the limits
 */
export function filterRows(table, sortColumn, isDescending, limits) {
  const rows = [];
  const columnLimits = [...limits]
    .filter(([name]) => table.columns.has(name))
    .map(([name, [low, high]]) => ({ values: getColumn(table, name), low, high }));
  for (let row = 0; row < table.length; row += 1) {
    if (!columnLimits.some(({ values, low, high }) => values[row] < low || values[row] > high)) rows.push(row);
  }
  const sortValues = getColumn(table, sortColumn);
  const sign = isDescending ? -1 : 1;
  return Uint32Array.from(
    rows.sort((first, second) => sign * (sortValues[first] - sortValues[second]) || first - second),
  );
}

/**
 * Return an array with a 1 at the id of each object that is not in one of the rows.
 * @param {Table} table @param {Uint32Array} rows of the displayed objects @param {number} [time] displayed time point of a time series
 * @returns {Uint8Array | null} null if no object is hidden
 */
export function createHiddenFlags(table, rows, time) {
  if (rows.length === table.length) return null;
  const labels = getColumn(table, "label");
  const times = table.columns.get("time");
  const flags = new Uint8Array(labels.reduce((max, label) => Math.max(max, label), 0) + 1).fill(1);
  for (const row of rows) if (times === undefined || times[row] === time) flags[labels[row]] = 0;
  return flags;
}

/** @param {string[]} names of the channels @param {unknown} channel parameter of a request: index or name @returns {number} index of the channel, -1 if the parameter does not select one */
export function findChannel(names, channel) {
  const text = String(channel ?? "");
  return /^\d+$/.test(text) ? Number(text) : names.indexOf(text || " ");
}
