/** View of the objects of a result, with a summary, histograms, and a table that renders only the visible rows. */

import { element, redraw } from "../core/elements.js";
import { computeMedian, formatCount, formatNumber, formatPart } from "../core/format.js";
import { getCssColor } from "../volumes/label_colors.js";
import {
  createHiddenFlags,
  filterRows,
  getColumn,
  getConfidenceColumn,
  getIntensityColumn,
} from "../volumes/object_table.js";
import { formatTimePoint } from "../volumes/time_points.js";
import { FilterPanel } from "./filter_panel.js";

/** @typedef {import("../volumes/object_table.js").Table} Table */
/**
 * @typedef {object} ViewOptions
 * @property {import("./stored_limits.js").Limits} [limits] limits of the displayed objects, changed by the view
 * @property {number} [channel] index of the segmented channel, -1 if unknown
 * @property {string[]} [channelNames] names of the channels, "" for channels without a name
 * @property {(() => unknown) | null} [segmentWithoutFilters] see `FilterPanel`
 */

const ROW_PIXELS = 28;
/** Number of rows to render above and below the visible rows. */
const MARGIN_ROWS = 8;
const COLUMN_TITLES = /** @type {Record<string, string>} */ ({
  label: "#",
  touching_border: "Border",
  confidence: "Conf.",
  mean_probability: "Prob.",
  time: "Time",
  track_id: "Track",
  parent: "Parent",
});

/** Explanations of columns, shown on hover. @type {Record<string, string>} */
const COLUMN_EXPLANATIONS = {
  confidence:
    "Estimated probability that the object matches a true object, with an intersection over union above 0.5. The confidence above the table is the mean of this column.",
  mean_probability:
    "Mean probability, according to the model, that the voxels of the object are not background. An object with a high probability can still be split, merged or outlined wrongly. The confidence above the table refers to the whole result.",
};

/** View that dispatches `select` with the label of the object that the user selected, and `filter` when the filters have changed. */
export class ObjectsView extends EventTarget {
  /** @param {Table} table @param {ViewOptions} [options] */
  constructor(table, { limits = new Map(), channel = -1, channelNames = [], segmentWithoutFilters = null } = {}) {
    super();
    this.table = table;
    this.limits = limits;
    this.channelNames = channelNames;
    this.labels = getColumn(table, "label");
    /** Time point of each row, 0 if the job did not segment a time series. */
    this.times = getColumn(table, "time");
    /** The displayed time point. */
    this.time = this.times[0] ?? 0;
    this.rowByKey = new Map([...this.labels].map((label, row) => [makeRowKey(label, this.times[row]), row]));
    const intensityColumn = getIntensityColumn(table, channel);
    this.columnNames = listDisplayedColumns(table, intensityColumn);
    this.sortColumn = "label";
    this.isDescending = false;
    this.selectedLabel = 0;
    this.rows = filterRows(table, this.sortColumn, this.isDescending, limits);
    /** The sorted rows, and the range of rows that is rendered. */
    this.renderedRange = { rows: this.rows.subarray(0, 0), first: 0, stop: 0 };
    this.filterPanel = new FilterPanel(table, limits, intensityColumn, segmentWithoutFilters);
    this.filterPanel.addEventListener("change", () => this.#updateRows());
    this.headerRow = element("tr");
    this.body = element("tbody");
    this.scroller = element(
      "div",
      { class: "scroller", tabIndex: 0, role: "region", "aria-label": "Objects, one per row" },
      element(
        "table",
        { class: "objects", "aria-rowcount": String(table.length + 1) },
        element("thead", {}, this.headerRow),
        this.body,
      ),
    );
    this.scroller.addEventListener("scroll", () => this.#drawRows());
    this.scroller.addEventListener("keydown", (event) => this.#onKey(event));
    this.body.addEventListener("click", (event) => {
      const row = /** @type {HTMLElement} */ (event.target).closest("tr");
      if (row?.dataset.row) this.#selectRow(Number(row.dataset.row));
    });
    this.root = element("div", { class: "objects-view" }, this.filterPanel.root, this.scroller);
    new ResizeObserver(() => this.#drawRows()).observe(this.scroller);
    this.#drawHeaderRow();
    this.#updateRows();
  }

  /** Describe the number and the median diameter of the displayed objects. */
  summarize() {
    const { table, rows } = this;
    if (table.length === 0) return "No objects.";
    const unit = table.unit === "um" ? "µm" : "voxels";
    const getShownValues = (/** @type {string} */ name) => {
      const values = getColumn(table, name);
      return Float64Array.from(rows, (row) => values[row]);
    };
    const timePointCount = new Set(this.times).size;
    const trackText = table.columns.has("track_id")
      ? ` in ${formatCount(new Set(getShownValues("track_id")).size, "track")}`
      : "";
    const timeText = timePointCount > 1 ? `${trackText} at ${formatCount(timePointCount, "time point")}` : "";
    const countText = formatPart(rows.length, table.length, "object") + timeText;
    if (rows.length === 0) return `${countText}.`;
    const touchingCount = getShownValues("touching_border").reduce((sum, value) => sum + value, 0);
    const borderText = touchingCount
      ? ` ${formatNumber(touchingCount)} ${touchingCount === 1 ? "touches" : "touch"} the border.`
      : "";
    return `${countText}, median diameter ${formatNumber(computeMedian(getShownValues("equivalent_diameter_area")))}\u00a0${unit}.${borderText}`;
  }

  /** An array with a 1 at the id of each object that the filters hide at the displayed time point; null if no object is hidden. */
  get hiddenFlags() {
    return createHiddenFlags(this.table, this.rows, this.time);
  }

  /** Return the center of an object's bounding box. The center is in voxels, because the user can change the voxel size. @param {number} label */
  getCenter(label) {
    const row = this.rowByKey.get(makeRowKey(label, this.time));
    if (row === undefined) return null;
    const getBound = (/** @type {number} */ index) => getColumn(this.table, `bbox-${index}`)[row];
    return /** @type {import("../volumes/planes.js").Triple} */ (
      [0, 1, 2].map((axis) => (getBound(axis) + getBound(axis + 3) - 1) / 2)
    );
  }

  /** Highlight the row of an object, and scroll to it. @param {number} label */
  select(label) {
    this.selectedLabel = label;
    const index = this.rows.indexOf(this.rowByKey.get(makeRowKey(label, this.time)) ?? -1);
    const { scroller } = this;
    if (index >= 0) {
      const top = index * ROW_PIXELS;
      const visibleHeight = scroller.clientHeight - ROW_PIXELS;
      if (top < scroller.scrollTop || top + ROW_PIXELS > scroller.scrollTop + visibleHeight)
        scroller.scrollTop = top - visibleHeight / 2;
    }
    this.#drawRows();
  }

  /** Select the object of a row, and dispatch `select`. @param {number} row */
  #selectRow(row) {
    const label = this.labels[row];
    this.time = this.times[row];
    this.selectedLabel = label;
    this.dispatchEvent(new CustomEvent("select", { detail: label }));
    this.select(label);
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const steps = /** @type {Record<string, number>} */ ({
      ArrowDown: 1,
      ArrowUp: -1,
      j: 1,
      k: -1,
      PageDown: 10,
      PageUp: -10,
    });
    const step = event.ctrlKey || event.metaKey || event.altKey ? undefined : steps[event.key];
    if (step === undefined || this.rows.length === 0) return;
    event.preventDefault();
    const currentIndex = this.rows.indexOf(this.rowByKey.get(makeRowKey(this.selectedLabel, this.time)) ?? -1);
    const nextIndex = Math.max(0, Math.min(this.rows.length - 1, currentIndex < 0 ? 0 : currentIndex + step));
    this.#selectRow(this.rows[nextIndex]);
  }

  /** Apply the limits after they were changed by another view. */
  showLimits() {
    this.filterPanel.show();
    this.#updateRows();
  }

  #updateRows() {
    this.rows = filterRows(this.table, this.sortColumn, this.isDescending, this.limits);
    this.filterPanel.showCount(this.rows.length);
    this.#drawRows();
    this.dispatchEvent(new Event("filter"));
  }

  #drawHeaderRow() {
    redraw(this.headerRow, () =>
      this.columnNames.map((name) =>
        element(
          "th",
          {
            scope: "col",
            "aria-sort": name === this.sortColumn ? (this.isDescending ? "descending" : "ascending") : undefined,
          },
          element(
            "button",
            {
              type: "button",
              id: `sort-${name}`,
              title: COLUMN_EXPLANATIONS[name],
              onclick: () => this.#sortByColumn(name),
            },
            `${getColumnTitle(name, this.table, this.channelNames)}${name === this.sortColumn ? (this.isDescending ? " ↓" : " ↑") : ""}`,
          ),
        ),
      ),
    );
  }

  /** @param {string} name */
  #sortByColumn(name) {
    this.isDescending = name === this.sortColumn ? !this.isDescending : name !== "label";
    this.sortColumn = name;
    this.#drawHeaderRow();
    this.#updateRows();
  }

  #drawRows() {
    const { scroller, rows, renderedRange } = this;
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_PIXELS) - MARGIN_ROWS);
    const stop = Math.min(
      rows.length,
      first + Math.ceil((scroller.clientHeight || 400) / ROW_PIXELS) + 2 * MARGIN_ROWS,
    );
    if (renderedRange.rows !== rows || renderedRange.first !== first || renderedRange.stop !== stop) {
      const elements = Array.from(rows.subarray(first, stop), (row, index) => this.#createRow(row, first + index));
      this.body.replaceChildren(createSpacer(first), ...elements, createSpacer(rows.length - stop));
      this.renderedRange = { rows, first, stop };
    }
    this.#highlightSelectedRow();
  }

  #highlightSelectedRow() {
    const selectedRow = this.rowByKey.get(makeRowKey(this.selectedLabel, this.time));
    for (const row of this.body.rows) {
      const isSelected = selectedRow !== undefined && row.dataset.row === String(selectedRow);
      if (row.classList.toggle("selected", isSelected)) row.ariaSelected = "true";
      else if (row.ariaSelected !== null) row.ariaSelected = null;
    }
  }

  /** Create the elements of a row. @param {number} row index of the row in the table @param {number} index index of the row after sorting */
  #createRow(row, index) {
    const label = this.labels[row];
    const cells = this.columnNames.map((name) => {
      const text = formatCell(name, getColumn(this.table, name)[row]);
      if (name !== "label" && name !== "track_id") return element("td", {}, text);
      const dot = element("span", { class: "dot" });
      dot.style.background = getCssColor(label);
      return element("td", {}, dot, text);
    });
    const attributes = { "data-label": String(label), "data-row": String(row), "aria-rowindex": String(index + 2) };
    return element("tr", attributes, ...cells);
  }
}

/** @param {number} label @param {number} time @returns {number} key that is unique within the table */
function makeRowKey(label, time) {
  return time * 2 ** 32 + label;
}

/** Create a row with the total height of rows that are not rendered. @param {number} rowCount */
function createSpacer(rowCount) {
  const row = element("tr", { "aria-hidden": "true", class: "spacer" });
  row.style.height = `${rowCount * ROW_PIXELS}px`;
  return row;
}

/** @param {string} name of the column @param {number} value NaN if unknown, as is the confidence of objects that the user has changed */
function formatCell(name, value) {
  if (name === "label" || name === "track_id") return String(value);
  if (name === "confidence" || name === "mean_probability")
    return Number.isNaN(value) ? "–" : `${Math.round(value * 100)}%`;
  if (name === "touching_border") return value ? "yes" : "";
  if (name === "time") return formatTimePoint(value);
  return name === "parent" && value === 0 ? "" : formatNumber(value);
}

/** @param {Table} table @param {string | null} intensityColumn column of the segmented channel, which precedes those of the other channels @returns {string[]} names of the displayed columns */
function listDisplayedColumns(table, intensityColumn) {
  const otherIntensityColumns = [...table.columns.keys()].filter(
    (name) => name.startsWith("intensity_mean") && name !== intensityColumn,
  );
  // The label of a tracked object equals the id of its track.
  const idColumns = table.columns.has("track_id") ? ["track_id", "time", "parent"] : ["label", "time"];
  const names = [
    ...[...idColumns, "equivalent_diameter_area", "area", intensityColumn, getConfidenceColumn(table)],
    ...["touching_border", ...otherIntensityColumns],
  ];
  const presentNames = names.filter((name) => name !== null && table.columns.has(name)).map(String);
  // The parents of tracks need a column only if objects divide.
  return presentNames.filter((name) => name !== "parent" || getColumn(table, name).some((track) => track > 0));
}

/** @param {string} name @param {Table} table @param {string[]} channelNames */
function getColumnTitle(name, table, channelNames) {
  const unit = table.unit === "um" ? "µm" : "px";
  if (name === "area") return `Vol. ${unit}³`;
  if (name === "equivalent_diameter_area") return `Diam. ${unit}`;
  if (name === "intensity_mean") return "Mean";
  const channel = name.split("intensity_mean-")[1];
  if (channel !== undefined) return `Mean ${channelNames[Number(channel)] || Number(channel) + 1}`;
  return COLUMN_TITLES[name] ?? name;
}
