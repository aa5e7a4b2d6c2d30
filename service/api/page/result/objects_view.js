/** View of the objects of a result, with a summary, histograms, and a table that renders only the visible rows. */

import { button, element, redraw } from "../core/elements.js";
import { computeMedian, formatCount, formatNumber } from "../core/format.js";
import { filterRows, getColumn, hasCalibratedConfidence } from "../volumes/object_table.js";
import { getCssColor } from "../volumes/slices.js";
import { Histogram } from "./histogram.js";

/** @typedef {import("../volumes/object_table.js").Table} Table */

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
  /** @param {Table} table */
  constructor(table) {
    super();
    this.table = table;
    this.labels = getColumn(table, "label");
    /** Time point of each row, 0 if the job did not segment a time series. */
    this.times = getColumn(table, "time");
    /** The displayed time point. */
    this.time = this.times[0] ?? 0;
    this.rowByKey = new Map([...this.labels].map((label, row) => [makeRowKey(label, this.times[row]), row]));
    this.columnNames = listDisplayedColumns(table);
    this.sortColumn = "label";
    this.isDescending = false;
    this.selectedLabel = 0;
    /** Smallest and largest value of the displayed objects, by column name. @type {Map<string, [number, number]>} */
    this.limits = new Map();
    this.rows = filterRows(table, this.sortColumn, this.isDescending, this.limits);
    /** The sorted rows, and the range of rows that is rendered. */
    this.renderedRange = { rows: this.rows.subarray(0, 0), first: 0, stop: 0 };
    this.countText = element("span", { class: "muted", "aria-live": "polite" });
    this.showAllButton = button("Show all", () => this.#showAll(), "link");
    this.borderCheckbox = element("input", { type: "checkbox", onchange: () => this.#updateBorderFilter() });
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
    this.histograms = this.#createHistograms();
    this.root = element(
      "div",
      { class: "objects-view" },
      element("div", { class: "histograms" }, ...this.histograms.map(({ histogram }) => histogram.root)),
      element(
        "div",
        { class: "row between filters" },
        this.countText,
        this.showAllButton,
        element("label", { class: "inline-label" }, this.borderCheckbox, "Whole objects only"),
      ),
      this.scroller,
    );
    new ResizeObserver(() => this.#drawRows()).observe(this.scroller);
    this.#drawHeaderRow();
    this.#updateRows();
  }

  #createHistograms() {
    const unit = this.table.unit === "um" ? "µm³" : "voxels";
    const columns = [
      ["area", `Volume, ${unit}`],
      ...[...this.table.columns.keys()]
        .filter((name) => name.startsWith("intensity_mean"))
        .slice(0, 1)
        .map((name) => [name, "Mean intensity"]),
    ];
    return columns.map(([name, title]) => {
      const histogram = new Histogram(title, getColumn(this.table, name));
      histogram.addEventListener("change", () => {
        if (histogram.range) this.limits.set(name, histogram.range);
        else this.limits.delete(name);
        this.#updateRows();
      });
      return { name, histogram };
    });
  }

  /** Describe the number and the median diameter of the objects. */
  summarize() {
    const { table } = this;
    if (table.length === 0) return "No objects.";
    const unit = table.unit === "um" ? "µm" : "voxels";
    const timePointCount = new Set(this.times).size;
    const trackText = table.columns.has("track_id")
      ? ` in ${formatCount(new Set(getColumn(table, "track_id")).size, "track")}`
      : "";
    const timeText = timePointCount > 1 ? `${trackText} at ${formatCount(timePointCount, "time point")}` : "";
    const touchingCount = getColumn(table, "touching_border").reduce((sum, value) => sum + value, 0);
    const borderText = touchingCount
      ? ` ${formatNumber(touchingCount)} ${touchingCount === 1 ? "touches" : "touch"} the border.`
      : "";
    return `${formatCount(table.length, "object")}${timeText}, median diameter ${formatNumber(computeMedian(getColumn(table, "equivalent_diameter_area")))}\u00a0${unit}.${borderText}`;
  }

  /** An array with a 1 at the id of each object that the filters hide at the displayed time point; null if no object is hidden. */
  get hiddenFlags() {
    if (this.rows.length === this.table.length) return null;
    const flags = new Uint8Array(this.labels.reduce((max, label) => Math.max(max, label), 0) + 1).fill(1);
    for (const row of this.rows) if (this.times[row] === this.time) flags[this.labels[row]] = 0;
    return flags;
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
    const step = steps[event.key];
    if (step === undefined || this.rows.length === 0) return;
    event.preventDefault();
    const currentIndex = this.rows.indexOf(this.rowByKey.get(makeRowKey(this.selectedLabel, this.time)) ?? -1);
    const nextIndex = Math.max(0, Math.min(this.rows.length - 1, currentIndex < 0 ? 0 : currentIndex + step));
    this.#selectRow(this.rows[nextIndex]);
  }

  #updateBorderFilter() {
    if (this.borderCheckbox.checked) this.limits.set("touching_border", [0, 0]);
    else this.limits.delete("touching_border");
    this.#updateRows();
  }

  #showAll() {
    this.borderCheckbox.checked = false;
    this.limits.clear();
    for (const { histogram } of this.histograms) histogram.select(null);
    this.#updateRows();
  }

  #updateRows() {
    this.rows = filterRows(this.table, this.sortColumn, this.isDescending, this.limits);
    const isUnfiltered = this.rows.length === this.table.length;
    this.countText.textContent = isUnfiltered
      ? formatCount(this.table.length, "object")
      : `${formatNumber(this.rows.length)} of ${formatCount(this.table.length, "object")}`;
    this.showAllButton.hidden = isUnfiltered;
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
            `${getColumnTitle(name, this.table)}${name === this.sortColumn ? (this.isDescending ? " ↓" : " ↑") : ""}`,
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
      const value = getColumn(this.table, name)[row];
      if (name === "label" || name === "track_id") {
        const dot = element("span", { class: "dot" });
        dot.style.background = getCssColor(label);
        return element("td", {}, dot, String(label));
      }
      if (name === "confidence" || name === "mean_probability") return element("td", {}, `${Math.round(value * 100)}%`);
      if (name === "touching_border") return element("td", {}, value ? "yes" : "");
      return element("td", {}, name === "parent" && value === 0 ? "" : formatNumber(value));
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

/** @param {Table} table @returns {string[]} names of the displayed columns */
function listDisplayedColumns(table) {
  const intensityColumns = [...table.columns.keys()].filter((name) => name.startsWith("intensity_mean"));
  // The label of a tracked object equals the id of its track.
  const idColumns = table.columns.has("track_id") ? ["track_id", "time", "parent"] : ["label", "time"];
  const sizeColumns = ["equivalent_diameter_area", "area"];
  const confidenceColumn = hasCalibratedConfidence(table) ? "confidence" : "mean_probability";
  return [...idColumns, ...sizeColumns, ...intensityColumns, confidenceColumn, "touching_border"].filter((name) =>
    table.columns.has(name),
  );
}

/** @param {string} name @param {Table} table */
function getColumnTitle(name, table) {
  const unit = table.unit === "um" ? "µm" : "px";
  if (name === "area") return `Vol. ${unit}³`;
  if (name === "equivalent_diameter_area") return `Diam. ${unit}`;
  if (name.startsWith("intensity_mean")) return `Mean${name.slice("intensity_mean".length).replace("-", " ")}`;
  return COLUMN_TITLES[name] ?? name;
}
