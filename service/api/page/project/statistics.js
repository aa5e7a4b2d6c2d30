/** Measurements of the objects in the results of a project, and their quantiles. */

/** @typedef {{volumes: number[], intensities: number[], unit: string}} Objects measurements of the objects in a result; unit: unit of the volumes, "um" or "voxel" */
/** @typedef {{count: number, median: number, quartiles: [number, number], whiskers: [number, number]}} Summary whiskers: 5th and 95th percentile */

/** Columns of the table that `parseObjects` needs. */
export const COLUMNS = "area,unit,intensity_mean";
/** A comma that is not part of a quoted cell. */
const SEPARATOR_PATTERN = /,(?=(?:[^"]*"[^"]*")*[^"]*$)/;

/**
 * Parse the table of a project.
 * @param {string} text CSV with a header line
 * @param {Map<string, string | null>} channels segmented channel by job id, null if the stack has one channel
 * @returns {Map<string, Objects>} by job id
 */
export function parseObjects(text, channels) {
  const lines = text.trimEnd().split("\n");
  const columns = new Map(parseLine(lines[0] ?? "").map((name, index) => [name, index]));
  const [jobColumn, volumeColumn, unitColumn] = ["job", "area", "unit"].map((name) => columns.get(name) ?? -1);
  /** @type {Map<string, Objects>} */
  const objects = new Map();
  for (const line of lines.slice(1)) {
    const cells = parseLine(line);
    const job = cells[jobColumn];
    let entry = objects.get(job);
    if (entry === undefined) {
      entry = { volumes: [], intensities: [], unit: cells[unitColumn] };
      objects.set(job, entry);
    }
    entry.volumes.push(Number(cells[volumeColumn]));
    const intensity = readIntensity(cells, columns, channels.get(job) ?? null);
    if (intensity !== "") entry.intensities.push(Number(intensity));
  }
  return objects;
}

/** @param {string} line @returns {string[]} */
function parseLine(line) {
  if (!line.includes('"')) return line.split(",");
  return line.split(SEPARATOR_PATTERN).map((cell) => cell.replace(/^"|"$/g, "").replaceAll('""', '"'));
}

/** Return the mean intensity of an object in the segmented channel, "" if it is not known. @param {string[]} cells @param {Map<string, number>} columns @param {string | null} channel */
function readIntensity(cells, columns, channel) {
  const onlyChannel = cells[columns.get("intensity_mean") ?? -1];
  return onlyChannel || (cells[columns.get(`intensity_mean-${channel ?? 0}`) ?? -1] ?? "");
}

/** @param {number[]} values @returns {Summary | null} null if there are no values */
export function summarize(values) {
  const sorted = Float64Array.from(values.filter(Number.isFinite)).sort();
  if (sorted.length === 0) return null;
  /** @param {number} fraction */
  const quantile = (fraction) => {
    const position = fraction * (sorted.length - 1);
    const index = Math.floor(position);
    const next = sorted[Math.min(index + 1, sorted.length - 1)];
    return sorted[index] + (position - index) * (next - sorted[index]);
  };
  return {
    count: sorted.length,
    median: quantile(0.5),
    quartiles: [quantile(0.25), quantile(0.75)],
    whiskers: [quantile(0.05), quantile(0.95)],
  };
}
