/** Training a model with annotated stacks: the dialog that starts it, and the view that follows it. */

import { describeAnnotation, fetchAnnotations, openDialog } from "./annotations.js";
import { button, element, field } from "./elements.js";
import { json, Problem, request } from "./server.js";
import { counted, duration, number } from "./words.js";

/**
 * @typedef {object} Training
 * @property {string} id
 * @property {string} state waiting, running, done, failed, cancelled or interrupted
 * @property {number} step
 * @property {number} steps
 * @property {number | null} seconds_left
 * @property {[number, number][]} loss step and value
 * @property {[number, number][]} validation step and score
 * @property {number | null} before score of the model that was trained, on the annotated part
 * @property {number | null} after score of the new model there
 * @property {boolean | null} better
 * @property {string | null} message
 * @property {string | null} model name of the new model
 * @property {string[]} [annotations] ids of the annotated stacks
 */

const POLL_MILLISECONDS = 1000;

/** Choose a model and annotated stacks, and start. @param {string} [model] that is improved */
export async function trainingDialog(model = "") {
  const [annotations, served] = await Promise.all([fetchAnnotations(), json("models")]);
  const names = /** @type {{name: string, decoding: string | null}[]} */ (served.models).map(({ name }) => name);
  const base = model.split("/")[0] || served.default;
  const bases = element(
    "select",
    {},
    ...names.map((name) => element("option", { value: name, selected: name === base }, name)),
  );
  const named = element("input", {
    type: "text",
    value: freeName(base, names),
    required: true,
    pattern: "[a-z0-9][a-z0-9_\\-]*",
    title: "Small letters, digits, - and _",
    maxLength: 64,
  });
  const minutes = element("input", { type: "number", value: "10", min: "1", max: "1440", required: true });
  const boxes = annotations.map((annotation) => ({
    annotation,
    box: element("input", { type: "checkbox", checked: true }),
  }));
  const problem = element("p", { class: "warning-text", role: "alert" });
  const start = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const chosen = boxes.filter(({ box }) => box.checked).map(({ annotation }) => annotation.id);
    const body = JSON.stringify({
      model: bases.value,
      annotations: chosen,
      minutes: Number(minutes.value),
      name: named.value,
    });
    try {
      if (chosen.length === 0) throw new Problem("", "Choose at least one annotated stack.", 0);
      const headers = { "Content-Type": "application/json" };
      const { id } = await json("trainings", { method: "POST", body, headers });
      dialog.close();
      location.hash = `training=${id}`;
    } catch (error) {
      problem.textContent = /** @type {Error} */ (error).message;
    }
  };
  const none = element(
    "p",
    { class: "muted" },
    "There are none yet: correct a result, and keep it as annotated stack.",
  );
  const list = element(
    "fieldset",
    { class: "field choices" },
    element("legend", { class: "field-name" }, "Annotated stacks"),
    ...boxes.map(({ annotation, box }) =>
      element(
        "label",
        { class: "slim" },
        box,
        element("span", {}, annotation.name),
        element("span", { class: "muted small" }, describeAnnotation(annotation)),
      ),
    ),
    annotations.length === 0 && none,
  );
  const dialog = openDialog(
    "Improve the model",
    element(
      "form",
      { class: "dialog-form", onsubmit: start },
      element(
        "p",
        { class: "muted" },
        "The model goes on learning from these stacks. The result is a new model; the one it began with stays as it is.",
      ),
      list,
      field("Model to begin with", bases),
      field("Name of the new model", named),
      field("Minutes", minutes, element("span", { class: "muted small" }, "Requests go first meanwhile.")),
      problem,
      element(
        "div",
        { class: "row end" },
        button("Cancel", () => dialog.close(), "secondary"),
        element("button", { type: "submit", class: "primary", disabled: annotations.length === 0 }, "Start"),
      ),
    ),
  );
}

/** @param {string} base @param {string[]} names that are taken */
function freeName(base, names) {
  const stem = `${base.replace(/-\d+$/, "")}-`;
  let free = 2;
  while (names.includes(stem + free)) free += 1;
  return stem + free;
}

/** @param {Training} training */
function isOver({ state }) {
  return state !== "waiting" && state !== "running";
}

/**
 * Follow a training, until it is over or another view is shown.
 * @param {HTMLElement} root @param {string} id @param {AbortSignal} signal
 * @param {{segment: (annotation: string, model: string) => void}} actions segment: the stack of an annotation with a model
 */
export async function watchTraining(root, id, signal, actions) {
  const view = new TrainingView(root, id, actions);
  for (;;) {
    try {
      /** @type {Training} */
      const training = await json(`trainings/${id}`, { signal });
      view.show(training);
      if (isOver(training)) return;
    } catch (error) {
      if (signal.aborted) return;
      // A service that restarts is waited for.
      if (!(error instanceof Problem) || error.status !== 0) throw error;
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MILLISECONDS));
    if (signal.aborted) return;
  }
}

class TrainingView {
  /** @param {HTMLElement} root @param {string} id @param {{segment: (annotation: string, model: string) => void}} actions */
  constructor(root, id, actions) {
    this.actions = actions;
    this.words = element("p", { class: "big", role: "status" }, "Asking how far it is");
    this.bar = element("progress", { max: 1, "aria-label": "How far the training is" });
    this.detail = element("p", { class: "muted" });
    this.loss = new Curve("Loss in training", (value) => number(value));
    this.score = new Curve("Score on what was held out", percent);
    this.result = element("div", { class: "training-result" });
    this.cancel = button(
      "Stop the training",
      async () => {
        this.cancel.disabled = true;
        await request(`trainings/${id}`, { method: "DELETE" }).catch(() => undefined);
      },
      "secondary",
    );
    root.replaceChildren(
      element(
        "section",
        { class: "card training", "aria-label": "Training" },
        this.words,
        this.bar,
        this.detail,
        element("div", { class: "curves" }, this.loss.root, this.score.root),
        this.result,
        this.cancel,
        element("p", { class: "muted small" }, "You may leave this page: the training goes on."),
      ),
    );
  }

  /** @param {Training} training */
  show(training) {
    const { state, step, steps, seconds_left: left } = training;
    this.words.textContent = describe(training);
    this.bar.hidden = this.cancel.hidden = isOver(training);
    if (state === "running" && steps > 0) this.bar.value = Math.min(1, step / steps);
    else this.bar.removeAttribute("value");
    this.detail.textContent = [
      step > 0 && counted(step, "step"),
      state === "running" && left !== null && `${duration(left)} left`,
    ]
      .filter(Boolean)
      .join(", ");
    this.loss.show(training.loss);
    this.score.show(training.validation);
    this.#showResult(training);
  }

  /** @param {Training} training */
  #showResult(training) {
    const { before, after, better, message, model, state, annotations = [] } = training;
    const scores = before !== null && after !== null;
    const done = state === "done" && model !== null;
    this.result.replaceChildren(
      ...[
        scores &&
          element(
            "dl",
            { class: "scores" },
            element("div", {}, element("dt", {}, "Before"), element("dd", {}, percent(before))),
            element("div", {}, element("dt", {}, "After"), element("dd", {}, percent(after))),
          ),
        message && element("p", { class: better === false || state === "failed" ? "warning-text" : "muted" }, message),
        done &&
          annotations.length > 0 &&
          button(
            `Segment the stack with ${model}`,
            () => this.actions.segment(annotations[0], model),
            better === false ? "secondary" : "primary",
          ),
      ].filter((child) => child instanceof Node),
    );
  }
}

/** @param {Training} training */
function describe({ state, model, better }) {
  if (state === "done")
    return better === false ? "The new model is not better" : `${model ?? "The new model"} is ready`;
  return (
    {
      waiting: "Waiting for its turn",
      running: "Learning",
      failed: "The training has failed",
      cancelled: "Stopped",
      interrupted: "The service was stopped meanwhile; start it again",
    }[state] ?? state
  );
}

/** @param {number} share */
function percent(share) {
  return `${number(100 * share)} %`;
}

/** A line on a canvas, with its range and last value in words. */
class Curve {
  /** @param {string} title @param {(value: number) => string} format */
  constructor(title, format) {
    this.format = format;
    this.title = title;
    this.last = element("span", { class: "muted" });
    this.canvas = element("canvas", { role: "img" });
    this.foot = element("div", { class: "axis muted" });
    this.root = element(
      "figure",
      { class: "curve", hidden: true },
      element("figcaption", {}, element("span", {}, title), this.last),
      this.canvas,
      this.foot,
    );
  }

  /** @param {[number, number][]} points */
  show(points) {
    this.root.hidden = points.length === 0;
    if (points.length === 0) return;
    const values = points.map(([, value]) => value);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    const last = points[points.length - 1];
    this.last.textContent = this.format(last[1]);
    this.canvas.setAttribute(
      "aria-label",
      `${this.title}: from ${this.format(values[0])} to ${this.format(last[1])} in ${counted(last[0], "step")}`,
    );
    this.foot.replaceChildren(
      element("span", {}, `step ${points[0][0]}`),
      element("span", {}, `${this.format(least)} – ${this.format(most)}`),
      element("span", {}, String(last[0])),
    );
    this.#draw(points, least, most);
  }

  /** @param {[number, number][]} points @param {number} least @param {number} most */
  #draw(points, least, most) {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const context = canvas.getContext("2d");
    if (context === null) return;
    context.scale(ratio, ratio);
    context.strokeStyle = context.fillStyle = getComputedStyle(canvas).color;
    context.lineWidth = 1.5;
    const [width, height] = [canvas.clientWidth - 8, canvas.clientHeight - 8];
    const first = points[0][0];
    const span = Math.max(1, points[points.length - 1][0] - first);
    context.beginPath();
    for (const [step, value] of points) {
      const x = 4 + (width * (step - first)) / span;
      const y = 4 + height * (1 - (value - least) / Math.max(most - least, 1e-12));
      context.lineTo(x, y);
      if (points.length < 40) context.fillRect(x - 2, y - 2, 4, 4);
    }
    context.stroke();
  }
}
