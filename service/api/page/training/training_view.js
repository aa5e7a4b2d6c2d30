/** The training of a model, followed until it is over, and the trainings of the service. */

import { button, element, redraw } from "../core/elements.js";
import { ago, counted, duration, number } from "../core/format.js";
import { json, Problem, request, requestOnce } from "../core/requests.js";
import { Curves } from "./curves.js";

/** @typedef {import("openapi").TrainingReport} Training */

const POLL_MILLISECONDS = 1000;

const STAGES = /** @type {Record<string, string>} */ ({
  reading: "Reading the annotated stacks",
  scoring: "Measuring the model that it begins with",
  learning: "Learning",
  finishing: "Making a model of what was learned",
  evaluating: "Measuring what it has learned",
  serving: "Making the new model ready",
});

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
    this.curves = new Curves("Loss", ["in training", "on what was held out"]);
    this.result = element("div", { class: "training-result" });
    this.cancel = button(
      "Stop the training",
      async () => {
        this.cancel.disabled = true;
        await request(`trainings/${id}`, { method: "DELETE" }).catch(() => undefined);
      },
      "secondary",
    );
    this.note = element("p", { class: "muted small" }, "You may leave this page: the training goes on.");
    root.replaceChildren(
      element(
        "section",
        { class: "card training", "aria-label": "Training" },
        this.words,
        this.bar,
        this.detail,
        this.curves.root,
        this.result,
        this.cancel,
        this.note,
      ),
    );
  }

  /** @param {Training} training */
  show(training) {
    const { state, stage, step, steps, seconds_left: left, loss, validation } = training;
    this.words.textContent = describe(training);
    this.bar.hidden = this.cancel.hidden = this.note.hidden = isOver(training);
    if (stage === "learning" && steps) this.bar.value = Math.min(1, step / steps);
    else this.bar.removeAttribute("value");
    this.detail.textContent = [
      step > 0 && counted(step, "step"),
      state === "running" && left !== null && `${duration(left)} left`,
    ]
      .filter(Boolean)
      .join(", ");
    this.curves.show([loss, validation]);
    this.#showResult(training);
  }

  /** A button for those who may delete the model. @param {Training} training @param {string} model */
  #deleteButton(training, model) {
    const remove = async () => {
      if (!confirm(`Delete the model ${model} and its files?`)) return;
      try {
        await requestOnce(`models/${model}`, { method: "DELETE" });
        this.show({ ...training, model: null });
      } catch (error) {
        made.replaceWith(element("p", { class: "warning-text" }, /** @type {Error} */ (error).message));
      }
    };
    const made = button("Delete the model", remove, "link");
    made.hidden = true;
    json(`models/${model}`).then(
      ({ removable }) => (made.hidden = !removable),
      () => undefined,
    );
    return made;
  }

  /** @param {Training} training */
  #showResult(training) {
    const { before, after, better, message, model, state, annotations } = training;
    const scores = before !== null && after !== null;
    const done = state === "done" && model !== null;
    redraw(this.result, () => [
      scores &&
        element(
          "dl",
          { class: "scores" },
          element("div", {}, element("dt", {}, "Score before"), element("dd", {}, percent(before))),
          element("div", {}, element("dt", {}, "and after"), element("dd", {}, percent(after))),
        ),
      scores && element("p", { class: "muted small" }, "F1 of objects that overlap by half, on what was held out."),
      message && element("p", { class: better === false || state === "failed" ? "warning-text" : "muted" }, message),
      done &&
        annotations.length > 0 &&
        button(
          `Open the stack with ${model}`,
          () => this.actions.segment(annotations[0], model),
          better === false ? "secondary" : "primary",
        ),
      done && this.#deleteButton(training, model),
    ]);
  }
}

/** @param {Training} training */
function describe({ state, stage, name, better, position, model }) {
  if (state === "done" && model === null) return `The model ${name} is deleted`;
  if (state === "done") return better === false ? `${name} is ready, and not better` : `${name} is ready`;
  if (state === "waiting" && position !== null && position > 1)
    return `${counted(position - 1, "training")} before this one`;
  if (state === "running") return describeStage(stage);
  return (
    {
      waiting: "Waiting for its turn",
      failed: "The training has failed",
      cancelled: "Stopped",
      interrupted: "The service was stopped meanwhile; start it again",
    }[state] ?? state
  );
}

/** What a training that runs does, for readers. @param {string | null} stage */
export function describeStage(stage) {
  return STAGES[stage ?? "learning"] ?? STAGES.learning;
}

/** @param {number} share */
function percent(share) {
  return `${number(100 * share)} %`;
}

/** The trainings of the service, for the first screen. @returns {Promise<HTMLElement | null>} null: there are none */
export async function trainingsList() {
  /** @type {Training[]} */
  const list = (await json("trainings")).trainings;
  if (list.length === 0) return null;
  return element(
    "section",
    { class: "recent", "aria-labelledby": "trainings-title" },
    element("h2", { id: "trainings-title" }, "Trainings"),
    element(
      "ul",
      {},
      ...list.map((training) =>
        element(
          "li",
          { class: "annotated" },
          element(
            "a",
            { class: "recent-words", href: `#training=${training.id}` },
            element("strong", {}, training.name),
            element("span", { class: "muted" }, `${describe(training)} · ${ago(training.created)}`),
          ),
        ),
      ),
    ),
  );
}
