/** Table of objects with the columns that the service writes. Each column has one number per object. */

/** @typedef {{columns: Map<string, Float64Array>, length: number, unit: string}} Table */

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

/** @param {Table} table @returns {boolean} whether the confidences are probabilities that the objects are right, and not mean probabilities of voxels */
export function hasCalibratedConfidence(table) {
  const means = getColumn(table, "mean_probability");
  return getColumn(table, "confidence").some((confidence, row) => confidence !== means[row]);
}

/**
 * Return the indices of the rows within all limits, sorted by a column.
 * @param {Table} table @param {string} sortColumn @param {boolean} isDescending
 * @param {Map<string, [number, number]>} limits smallest and largest value by column
 */
export function filterRows(table, sortColumn, isDescending, limits) {
  const rows = [];
  const columnLimits = [...limits].map(([name, [low, high]]) => ({ values: getColumn(table, name), low, high }));
  for (let row = 0; row < table.length; row += 1) {
    if (columnLimits.every(({ values, low, high }) => values[row] >= low && values[row] <= high)) rows.push(row);
  }
  const sortValues = getColumn(table, sortColumn);
  const sign = isDescending ? -1 : 1;
  return Uint32Array.from(
    rows.sort((first, second) => sign * (sortValues[first] - sortValues[second]) || first - second),
  );
}
