/** The objects of a result: summary, histograms, and a table that renders only the visible rows. */

import { button, element, redraw } from "../core/elements.js";
import { formatCount, formatNumber, median } from "../core/format.js";
import { column, filterRows } from "../volumes/object_table.js";
import { cssColor } from "../volumes/slices.js";
import { Histogram } from "./histogram.js";

/** @typedef {import("../volumes/object_table.js").Table} Table */

const ROW_PIXELS = 28;
const SPARE_ROWS = 8;
const TITLES = /** @type {Record<string, string>} */ ({
  label: "#",
  touching_border: "Border",
  confidence: "Conf.",
  time: "Time",
  track_id: "Track",
  parent: "Parent",
});

/** Events: `select` with the label that the user selected, `filter` when the filters have changed. */
export class ObjectsView extends EventTarget {
  /** @param {Table} table */
  constructor(table) {
    super();
    this.table = table;
    this.labels = column(table, "label");
    /** Time point of each row, 0 without time points. */
    this.times = column(table, "time");
    /** The displayed time point. */
    this.time = this.times[0] ?? 0;
    this.rowOf = new Map([...this.labels].map((label, row) => [key(label, this.times[row]), row]));
    this.names = displayedColumns(table);
    this.sortColumn = "label";
    this.descending = false;
    this.selected = 0;
    /** @type {Map<string, [number, number]>} */
    this.limits = new Map();
    this.rows = filterRows(table, this.sortColumn, this.descending, this.limits);
    /** The rendered rows. */
    this.rendered = { rows: this.rows.subarray(0, 0), first: 0, last: 0 };
    this.count = element("span", { class: "muted", "aria-live": "polite" });
    this.clear = button("Show all", () => this.#showAll(), "link");
    this.border = element("input", { type: "checkbox", onchange: () => this.#filterBorder() });
    this.head = element("tr");
    this.body = element("tbody");
    this.scroller = element(
      "div",
      { class: "scroller", tabIndex: 0, role: "region", "aria-label": "Objects, one per row" },
      element(
        "table",
        { class: "objects", "aria-rowcount": String(table.length + 1) },
        element("thead", {}, this.head),
        this.body,
      ),
    );
    this.scroller.addEventListener("scroll", () => this.#drawRows());
    this.scroller.addEventListener("keydown", (event) => this.#onKey(event));
    this.body.addEventListener("click", (event) => {
      const row = /** @type {HTMLElement} */ (event.target).closest("tr");
      if (row?.dataset.row) this.#selectRow(Number(row.dataset.row));
    });
    this.histograms = this.#makeHistograms();
    this.root = element(
      "div",
      { class: "objects-view" },
      element("div", { class: "histograms" }, ...this.histograms.map(({ histogram }) => histogram.root)),
      element(
        "div",
        { class: "row between filters" },
        this.count,
        this.clear,
        element("label", { class: "slim" }, this.border, "Whole objects only"),
      ),
      this.scroller,
    );
    new ResizeObserver(() => this.#drawRows()).observe(this.scroller);
    this.#drawHead();
    this.#update();
  }

  #makeHistograms() {
    const unit = this.table.unit === "um" ? "µm³" : "voxels";
    const columns = [
      ["area", `Volume, ${unit}`],
      ...[...this.table.columns.keys()]
        .filter((name) => name.startsWith("intensity_mean"))
        .slice(0, 1)
        .map((name) => [name, "Mean intensity"]),
    ];
    return columns.map(([name, title]) => {
      const histogram = new Histogram(title, column(this.table, name));
      histogram.addEventListener("change", () => {
        if (histogram.range) this.limits.set(name, histogram.range);
        else this.limits.delete(name);
        this.#update();
      });
      return { name, histogram };
    });
  }

  /** Describe the number and the median diameter of the objects. */
  summarize() {
    const { table } = this;
    if (table.length === 0) return "No objects.";
    const unit = table.unit === "um" ? "µm" : "voxels";
    const points = new Set(this.times).size;
    const tracks = table.columns.has("track_id")
      ? ` in ${formatCount(new Set(column(table, "track_id")).size, "track")}`
      : "";
    const timePoints = points > 1 ? `${tracks} at ${formatCount(points, "time point")}` : "";
    const touching = column(table, "touching_border").reduce((sum, value) => sum + value, 0);
    const border = touching ? ` ${formatNumber(touching)} ${touching === 1 ? "touches" : "touch"} the border.` : "";
    return `${formatCount(table.length, "object")}${timePoints}, median diameter ${formatNumber(median(column(table, "equivalent_diameter_area")))}\u00a0${unit}.${border}`;
  }

  /** 1 for each id that the filters hide at the displayed time point; null if no object is hidden. */
  get hidden() {
    if (this.rows.length === this.table.length) return null;
    const hidden = new Uint8Array(this.labels.reduce((max, label) => Math.max(max, label), 0) + 1).fill(1);
    for (const row of this.rows) if (this.times[row] === this.time) hidden[this.labels[row]] = 0;
    return hidden;
  }

  /** Return the center of an object's bounding box in voxels, which do not depend on the voxel size. @param {number} label */
  center(label) {
    const row = this.rowOf.get(key(label, this.time));
    if (row === undefined) return null;
    const limit = (/** @type {number} */ number) => column(this.table, `bbox-${number}`)[row];
    return /** @type {import("../volumes/planes.js").Triple} */ (
      [0, 1, 2].map((axis) => (limit(axis) + limit(axis + 3) - 1) / 2)
    );
  }

  /** Highlight the row of an object, and scroll to it. @param {number} label */
  select(label) {
    this.selected = label;
    const index = this.rows.indexOf(this.rowOf.get(key(label, this.time)) ?? -1);
    const { scroller } = this;
    if (index >= 0) {
      const top = index * ROW_PIXELS;
      const visible = scroller.clientHeight - ROW_PIXELS;
      if (top < scroller.scrollTop || top + ROW_PIXELS > scroller.scrollTop + visible)
        scroller.scrollTop = top - visible / 2;
    }
    this.#drawRows();
  }

  /** Select the object of a row, and dispatch `select`. @param {number} row */
  #selectRow(row) {
    const label = this.labels[row];
    this.time = this.times[row];
    this.selected = label;
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
    const current = this.rows.indexOf(this.rowOf.get(key(this.selected, this.time)) ?? -1);
    const next = Math.max(0, Math.min(this.rows.length - 1, current < 0 ? 0 : current + step));
    this.#selectRow(this.rows[next]);
  }

  #filterBorder() {
    if (this.border.checked) this.limits.set("touching_border", [0, 0]);
    else this.limits.delete("touching_border");
    this.#update();
  }

  #showAll() {
    this.border.checked = false;
    this.limits.clear();
    for (const { histogram } of this.histograms) histogram.select(null);
    this.#update();
  }

  #update() {
    this.rows = filterRows(this.table, this.sortColumn, this.descending, this.limits);
    const showsAll = this.rows.length === this.table.length;
    this.count.textContent = showsAll
      ? formatCount(this.table.length, "object")
      : `${formatNumber(this.rows.length)} of ${formatCount(this.table.length, "object")}`;
    this.clear.hidden = showsAll;
    this.#drawRows();
    this.dispatchEvent(new Event("filter"));
  }

  #drawHead() {
    redraw(this.head, () =>
      this.names.map((name) =>
        element(
          "th",
          {
            scope: "col",
            "aria-sort": name === this.sortColumn ? (this.descending ? "descending" : "ascending") : undefined,
          },
          element(
            "button",
            { type: "button", id: `sort-${name}`, onclick: () => this.#sort(name) },
            `${title(name, this.table)}${name === this.sortColumn ? (this.descending ? " ↓" : " ↑") : ""}`,
          ),
        ),
      ),
    );
  }

  /** @param {string} name */
  #sort(name) {
    this.descending = name === this.sortColumn ? !this.descending : name !== "label";
    this.sortColumn = name;
    this.#drawHead();
    this.#update();
  }

  #drawRows() {
    const { scroller, rows, rendered } = this;
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_PIXELS) - SPARE_ROWS);
    const last = Math.min(rows.length, first + Math.ceil((scroller.clientHeight || 400) / ROW_PIXELS) + 2 * SPARE_ROWS);
    if (rendered.rows !== rows || rendered.first !== first || rendered.last !== last) {
      const elements = Array.from(rows.subarray(first, last), (row, index) => this.#makeRow(row, first + index));
      this.body.replaceChildren(spacer(first), ...elements, spacer(rows.length - last));
      this.rendered = { rows, first, last };
    }
    this.#markSelected();
  }

  #markSelected() {
    const selected = this.rowOf.get(key(this.selected, this.time));
    for (const row of this.body.rows) {
      const isSelected = selected !== undefined && row.dataset.row === String(selected);
      if (row.classList.toggle("selected", isSelected)) row.ariaSelected = "true";
      else if (row.ariaSelected !== null) row.ariaSelected = null;
    }
  }

  /** @param {number} row @param {number} index of the row in the sorted table */
  #makeRow(row, index) {
    const label = this.labels[row];
    const cells = this.names.map((name) => {
      const value = column(this.table, name)[row];
      if (name === "label" || name === "track_id") {
        const dot = element("span", { class: "dot" });
        dot.style.background = cssColor(label);
        return element("td", {}, dot, String(label));
      }
      if (name === "confidence") return element("td", {}, `${Math.round(value * 100)}%`);
      if (name === "touching_border") return element("td", {}, value ? "yes" : "");
      return element("td", {}, name === "parent" && value === 0 ? "" : formatNumber(value));
    });
    const names = { "data-label": String(label), "data-row": String(row), "aria-rowindex": String(index + 2) };
    return element("tr", names, ...cells);
  }
}

/** @param {number} label @param {number} time @returns {number} unique within the table */
function key(label, time) {
  return time * 2 ** 32 + label;
}

/** Create a row with the height of rows that are not rendered. @param {number} rows number of rows */
function spacer(rows) {
  const row = element("tr", { "aria-hidden": "true", class: "spacer" });
  row.style.height = `${rows * ROW_PIXELS}px`;
  return row;
}

/** @param {Table} table @returns {string[]} names of the displayed columns */
function displayedColumns(table) {
  const intensities = [...table.columns.keys()].filter((name) => name.startsWith("intensity_mean"));
  // The label of a tracked object is the number of its track.
  const identity = table.columns.has("track_id") ? ["track_id", "time", "parent"] : ["label", "time"];
  const sizes = ["equivalent_diameter_area", "area"];
  return [...identity, ...sizes, ...intensities, "confidence", "touching_border"].filter((name) =>
    table.columns.has(name),
  );
}

/** @param {string} name @param {Table} table */
function title(name, table) {
  const unit = table.unit === "um" ? "µm" : "px";
  if (name === "area") return `Vol. ${unit}³`;
  if (name === "equivalent_diameter_area") return `Diam. ${unit}`;
  if (name.startsWith("intensity_mean")) return `Mean${name.slice("intensity_mean".length).replace("-", " ")}`;
  return TITLES[name] ?? name;
}
