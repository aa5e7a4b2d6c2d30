/** Histogram of a table column with two handles. The values between the handles are selected. */

import { element } from "../core/elements.js";
import { formatNumber } from "../core/format.js";

const BIN_COUNT = 32;
/** Number of steps between the ends of the histogram at which a handle can stop. */
const HANDLE_STEPS = 160;
/** Columns with positive values whose ratio exceeds this limit have a logarithmic axis. */
const MAX_LINEAR_RATIO = 50;
/** Number of significant digits of a limit that was set with a handle. */
const LIMIT_DIGITS = 3;

/** @typedef {0 | 1} End 0 for the smallest, 1 for the largest selected value */

/** Histogram that dispatches `change` when the user has changed the selected range. */
export class Histogram extends EventTarget {
  /** @param {string} title @param {Float64Array} values NaN for unknown values @param {number} [factor] displayed values are the values times this factor */
  constructor(title, values, factor = 1) {
    super();
    this.factor = factor;
    let [min, max] = [Infinity, -Infinity];
    for (const value of values) {
      if (value < min) min = value;
      if (value > max) max = value;
    }
    this.isEmpty = !Number.isFinite(min);
    this.min = this.isEmpty ? 0 : min;
    this.max = this.isEmpty ? 0 : max;
    this.isLogarithmic = this.min > 0 && this.max / this.min > MAX_LINEAR_RATIO;
    this.counts = this.#countValues(values);
    /** The selected range. Its ends are infinite if they are not limited. @type {[number, number]} */
    this.range = [-Infinity, Infinity];
    this.canvas = element("canvas", {
      role: "img",
      "aria-label": `Histogram of ${title}, ${this.isEmpty ? "without values" : `from ${this.#format(this.min)} to ${this.#format(this.max)}`}`,
    });
    this.handles = this.#createHandles(title);
    this.fields = this.#createFields(title);
    this.root = element(
      "figure",
      { class: "histogram" },
      element("figcaption", {}, title),
      element("div", { class: "histogram-plot" }, this.canvas, ...this.handles),
      element("div", { class: "histogram-limits" }, ...this.fields),
    );
    this.#listenToDragging();
    this.canvas.addEventListener("theme", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    this.#showRange();
  }

  /** @param {number} value */
  #format(value) {
    return formatNumber(value * this.factor);
  }

  /** @param {number} displayedValue @returns {number} value without the rounding error of the division */
  #parse(displayedValue) {
    return Number((displayedValue / this.factor).toPrecision(12));
  }

  /** @param {number} value @returns {number} position along the axis from 0 to 1 */
  #getPosition(value) {
    if (this.min === this.max) return 0.5;
    return this.isLogarithmic
      ? Math.log(value / this.min) / Math.log(this.max / this.min)
      : (value - this.min) / (this.max - this.min);
  }

  /** @param {number} position along the axis from 0 to 1 @returns {number} */
  #getValue(position) {
    return this.isLogarithmic
      ? this.min * (this.max / this.min) ** position
      : this.min + position * (this.max - this.min);
  }

  /** @param {Float64Array} values @returns {Uint32Array} number of values in each bin */
  #countValues(values) {
    const counts = new Uint32Array(BIN_COUNT);
    for (const value of values)
      if (!Number.isNaN(value)) counts[Math.min(BIN_COUNT - 1, Math.floor(this.#getPosition(value) * BIN_COUNT))] += 1;
    return counts;
  }

  /** Create the sliders that move the ends of the range. @param {string} title */
  #createHandles(title) {
    return /** @type {End[]} */ ([0, 1]).map((end) =>
      element("input", {
        type: "range",
        min: "0",
        max: String(HANDLE_STEPS),
        disabled: this.min === this.max,
        "aria-label": `${end ? "Largest" : "Smallest"} ${title}, slider`,
        oninput: (/** @type {Event} */ event) =>
          this.#moveEnd(end, Number(/** @type {HTMLInputElement} */ (event.target).value) / HANDLE_STEPS),
      }),
    );
  }

  /** Create the fields for the ends of the range. @param {string} title */
  #createFields(title) {
    return /** @type {End[]} */ ([0, 1]).map((end) => {
      const field = element("input", {
        type: "number",
        step: "any",
        placeholder: this.isEmpty ? "–" : this.#format(end ? this.max : this.min).replaceAll(",", ""),
        "aria-label": `${end ? "Largest" : "Smallest"} ${title}`,
        onchange: () => this.#setEnd(end, field.value === "" ? null : this.#parse(Number(field.value))),
      });
      return field;
    });
  }

  /** Let the user drag across the histogram to select a range, and double-click to select all values. */
  #listenToDragging() {
    const { canvas } = this;
    let start = 0;
    const getPosition = (/** @type {PointerEvent} */ event) => {
      const bounds = canvas.getBoundingClientRect();
      return Math.max(0, Math.min(1, (event.clientX - bounds.left) / bounds.width));
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      start = getPosition(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!canvas.hasPointerCapture(event.pointerId)) return;
      const position = getPosition(event);
      if (Math.abs(position - start) < 1 / HANDLE_STEPS) return;
      this.#moveEnd(0, Math.min(start, position));
      this.#moveEnd(1, Math.max(start, position));
    });
    canvas.addEventListener("dblclick", () => {
      this.select([-Infinity, Infinity]);
      this.dispatchEvent(new Event("change"));
    });
  }

  /** @param {End} end @param {number} position along the axis; no limit at the ends of the axis */
  #moveEnd(end, position) {
    if (position === end) return this.#setEnd(end, null);
    // Rounded, so that the displayed limit is the limit that is used.
    const displayedValue = Number((this.#getValue(position) * this.factor).toPrecision(LIMIT_DIGITS));
    return this.#setEnd(end, this.#parse(displayedValue));
  }

  /** Set one end of the range. The other end moves if necessary. @param {End} end @param {number | null} value null for no limit */
  #setEnd(end, value) {
    const limit = value ?? (end ? Infinity : -Infinity);
    const [low, high] = this.range;
    this.select(end ? [Math.min(low, limit), limit] : [limit, Math.max(high, limit)]);
    this.dispatchEvent(new Event("change"));
  }

  /** Select a range. @param {[number, number]} range infinite ends are not limited */
  select(range) {
    this.range = range;
    this.#showRange();
    this.draw();
  }

  #showRange() {
    for (const end of /** @type {End[]} */ ([0, 1])) {
      const value = this.range[end];
      const isLimited = Number.isFinite(value);
      const position = isLimited ? Math.max(0, Math.min(1, this.#getPosition(value))) : end;
      this.handles[end].value = String(Math.round(position * HANDLE_STEPS) || 0);
      this.handles[end].ariaValueText = isLimited ? this.#format(value) : "no limit";
      this.fields[end].value = isLimited ? String(Number((value * this.factor).toPrecision(12))) : "";
    }
    // The handle that can still be moved must be on top if both are at the same end.
    this.root?.classList.toggle("at-end", Number(this.handles[0].value) > HANDLE_STEPS / 2);
  }

  draw() {
    const { canvas, counts } = this;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.max(1, canvas.clientWidth * ratio);
    canvas.height = Math.max(1, canvas.clientHeight * ratio);
    const context = canvas.getContext("2d");
    if (context === null) return;
    const maxCount = Math.max(1, ...counts);
    const { color, borderBottomColor } = getComputedStyle(canvas);
    const width = canvas.width / BIN_COUNT;
    counts.forEach((count, bin) => {
      const center = this.#getValue((bin + 0.5) / BIN_COUNT);
      context.fillStyle = center >= this.range[0] && center <= this.range[1] ? color : borderBottomColor;
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
