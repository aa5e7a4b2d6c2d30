/** Histogram of a table column. The user can select a range of values by dragging. */

import { element } from "../core/elements.js";
import { formatNumber } from "../core/format.js";

const BIN_COUNT = 32;

/** Histogram that dispatches `change` when the selected range has changed. */
export class Histogram extends EventTarget {
  /** @param {string} title @param {Float64Array} values */
  constructor(title, values) {
    super();
    this.values = values;
    let [min, max] = [Infinity, -Infinity];
    for (const value of values) {
      min = Math.min(min, value);
      max = Math.max(max, value);
    }
    this.min = Number.isFinite(min) ? min : 0;
    this.max = Number.isFinite(max) && max > min ? max : this.min + 1;
    /** The selected range, null if all values are selected. @type {[number, number] | null} */
    this.range = null;
    this.canvas = element("canvas", {
      role: "img",
      "aria-label": `Histogram of ${title}, from ${formatNumber(this.min)} to ${formatNumber(this.max)}`,
    });
    this.rangeText = element("output", { class: "muted small" });
    this.root = element(
      "figure",
      { class: "histogram" },
      element("figcaption", {}, element("span", {}, title), this.rangeText),
      this.canvas,
      element(
        "div",
        { class: "axis muted small" },
        element("span", {}, formatNumber(this.min)),
        element("span", {}, formatNumber(this.max)),
      ),
    );
    this.#addEventListeners();
    this.canvas.addEventListener("theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  #addEventListeners() {
    let start = 0;
    const valueAt = (/** @type {PointerEvent} */ event) => {
      const bounds = this.canvas.getBoundingClientRect();
      const fraction = Math.max(0, Math.min(1, (event.clientX - bounds.left) / bounds.width));
      return this.min + fraction * (this.max - this.min);
    };
    this.canvas.addEventListener("pointerdown", (event) => {
      this.canvas.setPointerCapture(event.pointerId);
      start = valueAt(event);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.canvas.hasPointerCapture(event.pointerId)) return;
      const value = valueAt(event);
      this.select(
        Math.abs(value - start) < (this.max - this.min) / 100 ? null : [Math.min(start, value), Math.max(start, value)],
      );
    });
    this.canvas.addEventListener("click", () => {
      if (this.range && Math.abs(this.range[1] - this.range[0]) === 0) this.select(null);
    });
    this.canvas.addEventListener("dblclick", () => this.select(null));
  }

  /** Select a range. @param {[number, number] | null} range null to select all values */
  select(range) {
    this.range = range;
    this.rangeText.value = range ? `${formatNumber(range[0])} to ${formatNumber(range[1])}` : "";
    this.draw();
    this.dispatchEvent(new Event("change"));
  }

  draw() {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, canvas.clientWidth * ratio);
    canvas.height = Math.max(1, canvas.clientHeight * ratio);
    const context = canvas.getContext("2d");
    if (context === null) return;
    const counts = new Uint32Array(BIN_COUNT);
    const binsPerUnit = BIN_COUNT / (this.max - this.min);
    for (const value of this.values) counts[Math.min(BIN_COUNT - 1, Math.floor((value - this.min) * binsPerUnit))] += 1;
    const maxCount = Math.max(1, ...counts);
    const style = getComputedStyle(canvas);
    const width = canvas.width / BIN_COUNT;
    counts.forEach((count, bin) => {
      const center = this.min + (bin + 0.5) / binsPerUnit;
      const isSelected = this.range === null || (center >= this.range[0] && center <= this.range[1]);
      context.fillStyle = isSelected ? style.color : style.borderBottomColor;
      const height = (count / maxCount) * (canvas.height - 2);
      context.fillRect(
        bin * width + 0.5,
        canvas.height - height,
        Math.max(width - 1.5, 1),
        count ? Math.max(height, 1.5) : 0,
      );
    });
  }
}
