/** The time point that the views show, where a stack has several. */

import { element } from "../core/elements.js";

const WAIT_MILLISECONDS = 120;

export class TimeSlider extends EventTarget {
  constructor() {
    super();
    this.at = 0;
    this.timer = 0;
    this.slider = element("input", {
      type: "range",
      step: "1",
      "aria-label": "Time point that is shown",
      oninput: () => this.#choose(Number(this.slider.value)),
    });
    this.words = element("output", { class: "muted" });
    this.root = element(
      "div",
      { class: "tools", hidden: true, role: "group", "aria-label": "Time" },
      element("span", { class: "slim" }, "Time"),
      element(
        "button",
        { type: "button", class: "quiet icon", "aria-label": "Earlier", onclick: () => this.step(-1) },
        "‹",
      ),
      this.slider,
      element(
        "button",
        { type: "button", class: "quiet icon", "aria-label": "Later", onclick: () => this.step(1) },
        "›",
      ),
      this.words,
    );
  }

  /** @param {number} first @param {number} stop one beyond the last time point @param {number} at */
  show(first, stop, at) {
    this.root.hidden = stop - first < 2;
    this.slider.min = String(first);
    this.slider.max = String(stop - 1);
    this.at = Math.max(first, Math.min(stop - 1, at));
    this.#describe();
  }

  /** @param {number} points */
  step(points) {
    const next = Math.max(Number(this.slider.min), Math.min(Number(this.slider.max), this.at + points));
    if (next !== this.at && !this.root.hidden) this.#choose(next);
  }

  /** @param {number} at */
  #choose(at) {
    this.at = at;
    this.#describe();
    // Time points in between need not be fetched while the slider is dragged.
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.dispatchEvent(new Event("change")), WAIT_MILLISECONDS);
  }

  #describe() {
    this.slider.value = String(this.at);
    this.words.value = `${this.at} of ${this.slider.min} to ${this.slider.max}`;
  }
}
