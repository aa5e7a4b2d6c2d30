/** The objects of a result: in words, as histograms, and as a table of which only the visible rows are in the document. */

import { button, element, redraw } from "../core/elements.js";
import { counted, median, number } from "../core/format.js";
import { chooseRows, column } from "../volumes/object_table.js";
import { cssColour } from "../volumes/slices.js";
import { Histogram } from "./histogram.js";

/** @typedef {import("../volumes/object_table.js").Table} Table */

const ROW_PIXELS = 28;
const SPARE_ROWS = 8;
const TITLES = /** @type {Record<string, string>} */ ({
  label: "#",
  touching_border: "Edge",
  confidence: "Sure",
  time: "Time",
  track_id: "Track",
  parent: "Parent",
});

export class ObjectsView extends EventTarget {
  /** @param {Table} table */
  constructor(table) {
    super();
    this.table = table;
    this.labels = column(table, "label");
    /** Time point of each row; of a single stack all are 0. */
    this.times = column(table, "time");
    /** The time point that the views show. */
    this.time = this.times[0] ?? 0;
    this.rowOf = new Map([...this.labels].map((label, row) => [key(label, this.times[row]), row]));
    this.names = shownColumns(table);
    this.sorted = "label";
    this.descending = false;
    this.selected = 0;
    /** @type {Map<string, [number, number]>} */
    this.limits = new Map();
    this.rows = chooseRows(table, this.sorted, this.descending, this.limits);
    /** The rows that are in the document. */
    this.drawn = { rows: this.rows.subarray(0, 0), first: 0, last: 0 };
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
      if (row?.dataset.row) this.#choose(Number(row.dataset.row));
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
    const wanted = [
      ["area", `Volume, ${unit}`],
      ...[...this.table.columns.keys()]
        .filter((name) => name.startsWith("intensity_mean"))
        .slice(0, 1)
        .map((name) => [name, "Mean intensity"]),
    ];
    return wanted.map(([name, title]) => {
      const histogram = new Histogram(title, column(this.table, name));
      histogram.addEventListener("change", () => {
        if (histogram.chosen) this.limits.set(name, histogram.chosen);
        else this.limits.delete(name);
        this.#update();
      });
      return { name, histogram };
    });
  }

  /** Count and size in a sentence. */
  words() {
    const { table } = this;
    if (table.length === 0) return "No objects.";
    const unit = table.unit === "um" ? "µm" : "voxels";
    const points = new Set(this.times).size;
    const tracks = table.columns.has("track_id")
      ? ` in ${counted(new Set(column(table, "track_id")).size, "track")}`
      : "";
    const where = points > 1 ? `${tracks} at ${counted(points, "time point")}` : "";
    const cut = column(table, "touching_border").reduce((sum, value) => sum + value, 0);
    const border = cut ? ` ${number(cut)} of them ${cut === 1 ? "reaches" : "reach"} the border.` : "";
    return `${counted(table.length, "object")}${where}, median diameter ${number(median(column(table, "equivalent_diameter_area")))}\u00a0${unit}.${border}`;
  }

  /** For each id whether it is hidden by the filters; null where none is. */
  get hidden() {
    if (this.rows.length === this.table.length) return null;
    const hidden = new Uint8Array(this.labels.reduce((most, label) => Math.max(most, label), 0) + 1).fill(1);
    for (const row of this.rows) if (this.times[row] === this.time) hidden[this.labels[row]] = 0;
    return hidden;
  }

  /** The middle of an object's box, in voxels: places in micrometres depend on what is stated by now. @param {number} label */
  middle(label) {
    const row = this.rowOf.get(key(label, this.time));
    if (row === undefined) return null;
    const limit = (/** @type {number} */ number) => column(this.table, `bbox-${number}`)[row];
    return /** @type {import("../volumes/planes.js").Triple} */ (
      [0, 1, 2].map((axis) => (limit(axis) + limit(axis + 3) - 1) / 2)
    );
  }

  /** Show an object that was chosen elsewhere. @param {number} label */
  select(label) {
    this.selected = label;
    const place = this.rows.indexOf(this.rowOf.get(key(label, this.time)) ?? -1);
    const { scroller } = this;
    if (place >= 0) {
      const top = place * ROW_PIXELS;
      const visible = scroller.clientHeight - ROW_PIXELS;
      if (top < scroller.scrollTop || top + ROW_PIXELS > scroller.scrollTop + visible)
        scroller.scrollTop = top - visible / 2;
    }
    this.#drawRows();
  }

  /** @param {number} row of the table */
  #choose(row) {
    const label = this.labels[row];
    this.time = this.times[row];
    this.selected = label;
    this.dispatchEvent(new CustomEvent("choose", { detail: label }));
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
    const now = this.rows.indexOf(this.rowOf.get(key(this.selected, this.time)) ?? -1);
    const next = Math.max(0, Math.min(this.rows.length - 1, now < 0 ? 0 : now + step));
    this.#choose(this.rows[next]);
  }

  #filterBorder() {
    if (this.border.checked) this.limits.set("touching_border", [0, 0]);
    else this.limits.delete("touching_border");
    this.#update();
  }

  #showAll() {
    this.border.checked = false;
    this.limits.clear();
    for (const { histogram } of this.histograms) histogram.choose(null);
    this.#update();
  }

  #update() {
    this.rows = chooseRows(this.table, this.sorted, this.descending, this.limits);
    const all = this.rows.length === this.table.length;
    this.count.textContent = all
      ? counted(this.table.length, "object")
      : `${number(this.rows.length)} of ${counted(this.table.length, "object")}`;
    this.clear.hidden = all;
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
            "aria-sort": name === this.sorted ? (this.descending ? "descending" : "ascending") : undefined,
          },
          element(
            "button",
            { type: "button", id: `sort-${name}`, onclick: () => this.#sort(name) },
            `${title(name, this.table)}${name === this.sorted ? (this.descending ? " ↓" : " ↑") : ""}`,
          ),
        ),
      ),
    );
  }

  /** @param {string} name */
  #sort(name) {
    this.descending = name === this.sorted ? !this.descending : name !== "label";
    this.sorted = name;
    this.#drawHead();
    this.#update();
  }

  #drawRows() {
    const { scroller, rows, drawn } = this;
    const first = Math.max(0, Math.floor(scroller.scrollTop / ROW_PIXELS) - SPARE_ROWS);
    const last = Math.min(rows.length, first + Math.ceil((scroller.clientHeight || 400) / ROW_PIXELS) + 2 * SPARE_ROWS);
    if (drawn.rows !== rows || drawn.first !== first || drawn.last !== last) {
      const made = Array.from(rows.subarray(first, last), (row, place) => this.#makeRow(row, first + place));
      this.body.replaceChildren(spacer(first), ...made, spacer(rows.length - last));
      this.drawn = { rows, first, last };
    }
    this.#markChosen();
  }

  #markChosen() {
    const chosen = this.rowOf.get(key(this.selected, this.time));
    for (const row of this.body.rows) {
      const own = chosen !== undefined && row.dataset.row === String(chosen);
      if (row.classList.toggle("chosen", own)) row.ariaSelected = "true";
      else if (row.ariaSelected !== null) row.ariaSelected = null;
    }
  }

  /** @param {number} row @param {number} place */
  #makeRow(row, place) {
    const label = this.labels[row];
    const cells = this.names.map((name) => {
      const value = column(this.table, name)[row];
      if (name === "label" || name === "track_id") {
        const dot = element("span", { class: "dot" });
        dot.style.background = cssColour(label);
        return element("td", {}, dot, String(label));
      }
      if (name === "confidence") return element("td", {}, `${Math.round(value * 100)} %`);
      if (name === "touching_border") return element("td", {}, value ? "yes" : "");
      return element("td", {}, name === "parent" && value === 0 ? "" : number(value));
    });
    const names = { "data-label": String(label), "data-row": String(row), "aria-rowindex": String(place + 2) };
    return element("tr", names, ...cells);
  }
}

/** @param {number} label @param {number} time @returns {number} that no other object of the table has */
function key(label, time) {
  return time * 2 ** 32 + label;
}

/** @param {number} rows that are not drawn */
function spacer(rows) {
  const made = element("tr", { "aria-hidden": "true", class: "spacer" });
  made.style.height = `${rows * ROW_PIXELS}px`;
  return made;
}

/** @param {Table} table */
function shownColumns(table) {
  const intensities = [...table.columns.keys()].filter((name) => name.startsWith("intensity_mean"));
  // Where objects are linked, a label is the number of its track.
  const linked = table.columns.has("track_id") ? ["track_id", "time", "parent"] : ["label", "time"];
  const sizes = ["equivalent_diameter_area", "area"];
  return [...linked, ...sizes, ...intensities, "confidence", "touching_border"].filter((name) =>
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
