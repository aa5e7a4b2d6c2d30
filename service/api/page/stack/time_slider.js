/** Slider for the displayed time point. */

import { element } from "../core/elements.js";
import { formatTimePoint } from "../volumes/time_points.js";

const CHANGE_DELAY_MILLISECONDS = 120;

/** Slider that dispatches `change` when the user has moved to another time point. */
export class TimeSlider extends EventTarget {
  constructor() {
    super();
    this.time = 0;
    this.changeTimer = 0;
    this.slider = element("input", {
      type: "range",
      step: "1",
      "aria-label": "Displayed time point",
      oninput: () => this.#setTime(Number(this.slider.value)),
    });
    this.timeText = element("output", { class: "muted" });
    this.root = element(
      "div",
      { class: "tools", hidden: true, role: "group", "aria-label": "Time" },
      element("span", { class: "inline-label" }, "Time"),
      element(
        "button",
        { type: "button", class: "quiet icon", "aria-label": "Previous time point", onclick: () => this.moveBy(-1) },
        "‹",
      ),
      this.slider,
      element(
        "button",
        { type: "button", class: "quiet icon", "aria-label": "Next time point", onclick: () => this.moveBy(1) },
        "›",
      ),
      this.timeText,
    );
  }

  /** Set the range and the displayed time point. @param {number} first @param {number} stop one past the last time point @param {number} time */
  show(first, stop, time) {
    this.root.hidden = stop - first < 2;
    this.slider.min = String(first);
    this.slider.max = String(stop - 1);
    this.time = Math.max(first, Math.min(stop - 1, time));
    this.#updateControls();
  }

  /** Move by a number of time points. @param {number} count */
  moveBy(count) {
    const nextTime = Math.max(Number(this.slider.min), Math.min(Number(this.slider.max), this.time + count));
    if (nextTime !== this.time && !this.root.hidden) this.#setTime(nextTime);
  }

  /** @param {number} time */
  #setTime(time) {
    this.time = time;
    this.#updateControls();
    // Wait, so that intermediate time points are not fetched while the slider is dragged.
    clearTimeout(this.changeTimer);
    this.changeTimer = window.setTimeout(() => this.dispatchEvent(new Event("change")), CHANGE_DELAY_MILLISECONDS);
  }

  #updateControls() {
    this.slider.value = String(this.time);
    const [time, first, last] = [this.slider.value, this.slider.min, this.slider.max].map((text) =>
      formatTimePoint(Number(text)),
    );
    this.timeText.value = `${time} (${first} to ${last})`;
    this.slider.ariaValueText = time;
  }
}
