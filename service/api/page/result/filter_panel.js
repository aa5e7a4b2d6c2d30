/** Panel with the filters of the objects: histograms with handles, the border, and the number of displayed objects. */

import { button, element } from "../core/elements.js";
import { formatPart } from "../core/format.js";
import { getColumn, getConfidenceColumn } from "../volumes/object_table.js";
import { Histogram } from "./histogram.js";

/** @typedef {import("../volumes/object_table.js").Table} Table */
/** @typedef {import("./stored_limits.js").Limits} Limits */

const BORDER_COLUMN = "touching_border";

/** Panel that dispatches `change` when the user has changed the limits. */
export class FilterPanel extends EventTarget {
  /**
   * @param {Table} table @param {Limits} limits changed by the panel @param {string | null} intensityColumn column of the mean intensity in the segmented channel
   * @param {(() => unknown) | null} segmentWithoutFilters segments the stack again and keeps all objects that the model finds, null if this is not possible
   */
  constructor(table, limits, intensityColumn, segmentWithoutFilters) {
    super();
    this.limits = limits;
    this.totalCount = table.length;
    this.countText = element("span", { "aria-live": "polite" });
    this.showAllButton = button("Show all", () => this.#showAll(), "link");
    this.borderCheckbox = element("input", { type: "checkbox", onchange: () => this.#applyBorder() });
    const unit = table.unit === "um" ? "µm³" : "voxels";
    const confidenceColumn = getConfidenceColumn(table);
    /** @type {Map<string, Histogram>} */
    this.histograms = new Map();
    if (confidenceColumn) this.#addHistogram(table, confidenceColumn, "Confidence, %", 100);
    this.#addHistogram(table, "area", `Volume, ${unit}`);
    if (intensityColumn) this.#addHistogram(table, intensityColumn, "Mean intensity");
    this.root = element(
      "div",
      { class: "filter-panel" },
      element("div", { class: "histograms" }, ...[...this.histograms.values()].map(({ root }) => root)),
      element(
        "div",
        { class: "row between filters" },
        this.countText,
        this.showAllButton,
        element("label", { class: "inline-label" }, this.borderCheckbox, "Whole objects only"),
      ),
      segmentWithoutFilters &&
        element(
          "p",
          { class: "muted small filters" },
          "The model leaves out uncertain and tiny objects. ",
          button("Segment again with them", segmentWithoutFilters, "link"),
        ),
    );
    this.show();
  }

  /** @param {Table} table @param {string} column @param {string} title @param {number} [factor] */
  #addHistogram(table, column, title, factor) {
    const histogram = new Histogram(title, getColumn(table, column), factor);
    histogram.addEventListener("change", () => {
      if (histogram.range.some(Number.isFinite)) this.limits.set(column, histogram.range);
      else this.limits.delete(column);
      this.dispatchEvent(new Event("change"));
    });
    this.histograms.set(column, histogram);
  }

  #applyBorder() {
    if (this.borderCheckbox.checked) this.limits.set(BORDER_COLUMN, [0, 0]);
    else this.limits.delete(BORDER_COLUMN);
    this.dispatchEvent(new Event("change"));
  }

  #showAll() {
    this.limits.clear();
    this.show();
    this.dispatchEvent(new Event("change"));
  }

  /** Show the limits. */
  show() {
    this.borderCheckbox.checked = this.limits.has(BORDER_COLUMN);
    for (const [column, histogram] of this.histograms)
      histogram.select(this.limits.get(column) ?? [-Infinity, Infinity]);
  }

  /** @param {number} shownCount number of objects within the limits */
  showCount(shownCount) {
    this.countText.textContent = formatPart(shownCount, this.totalCount, "object");
    this.showAllButton.hidden = this.limits.size === 0;
  }
}
