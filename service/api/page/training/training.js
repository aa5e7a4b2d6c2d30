/** Training a model with annotated stacks: the dialog that starts it, and the view that follows it. */

import { button, element, field, redraw } from "../core/elements.js";
import { json, Problem, request, requestOnce } from "../core/requests.js";
import { ago, counted, duration, number } from "../core/words.js";
import { describeAnnotation, fetchAnnotations, openDialog } from "./annotations.js";

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

/**
 * Choose a model and annotated stacks, and start.
 * @param {number} most minutes that a training may take @param {string} [model] that is improved
 */
export async function trainingDialog(most, model = "") {
  const [annotations, served] = await Promise.all([fetchAnnotations(), json("models")]);
  /** @type {Served[]} */
  const models = served.models;
  const names = models.map(({ name }) => name);
  const base = model.split("/")[0] || served.default;
  let proposed = freeName(base, names);
  const changeBase = () => {
    if (named.value === proposed) named.value = proposed = freeName(bases.value, names);
    propose(boxes, bases.value, models);
  };
  const bases = element(
    "select",
    { onchange: changeBase },
    ...names.map((name) => element("option", { value: name, selected: name === base }, name)),
  );
  const named = element("input", {
    type: "text",
    value: proposed,
    required: true,
    pattern: "[a-z0-9][a-z0-9_\\-]*",
    title: "Small letters, digits, - and _",
    maxLength: 64,
  });
  const minutes = element("input", {
    type: "number",
    value: String(Math.min(10, most)),
    min: "0.01",
    max: String(most),
    step: "any",
    required: true,
  });
  const boxes = makeBoxes(annotations);
  propose(boxes, base, models);
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
      const { id } = await (await requestOnce("trainings", { method: "POST", body, headers })).json();
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
        { class: "choice" },
        box,
        element("span", {}, annotation.name),
        element("span", { class: "muted small" }, describeAnnotation(annotation)),
        annotation.overlaps.length > 0 &&
          element("span", { class: "small overlapping" }, `same place as ${namesOf(annotation.overlaps, annotations)}`),
      ),
    ),
    annotations.length === 0 && none,
  );
  const dialog = openDialog(
    "Improve a model",
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

/** @typedef {import("openapi").ModelInfo} Served */
/** @typedef {{annotation: import("openapi").AnnotationReport, box: HTMLInputElement}[]} Boxes */

/**
 * A box for each annotated stack. Of several with labels for the same place, ticking one takes the others back: a training
 * takes one of them.
 * @param {import("openapi").AnnotationReport[]} annotations newest first @returns {Boxes}
 */
function makeBoxes(annotations) {
  const boxes = annotations.map((annotation) => {
    const box = element("input", { type: "checkbox", onchange: () => box.checked && untick(annotation.overlaps) });
    return { annotation, box };
  });
  /** @param {string[]} ids */
  const untick = (ids) => {
    for (const { annotation, box } of boxes) if (ids.includes(annotation.id)) box.checked = false;
  };
  return boxes;
}

/**
 * Tick the stacks whose labels a model of the same kind has begun: another one finds other things. Of those for the same
 * place it is the newest.
 * @param {Boxes} boxes @param {string} base @param {Served[]} models
 */
function propose(boxes, base, models) {
  for (const { box } of boxes) box.checked = false;
  for (const { annotation, box } of boxes) {
    const { base_model: model, overlaps } = annotation;
    const same = model === null || firstOf(model, models) === firstOf(base, models);
    box.checked = same && !boxes.some((other) => other.box.checked && overlaps.includes(other.annotation.id));
  }
}

/** The model that trainings began with which led to this one. @param {string} model maybe with its version @param {Served[]} models */
function firstOf(model, models) {
  let [name] = model.split("/");
  // A name may have been given again, to a model that came from its namesake.
  for (const _ of models) {
    const parent = models.find((one) => one.name === name)?.lineage?.parent;
    if (!parent) return name;
    [name] = parent.split("/");
  }
  return name;
}

/** @param {string[]} ids @param {import("openapi").AnnotationReport[]} annotations */
function namesOf(ids, annotations) {
  const names = ids.map((id) => annotations.find((one) => one.id === id)?.name ?? "another one");
  return `${names.join(", ")}; a training takes one of them`;
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

/** Lines over the steps on one canvas, with their range and last values in words. */
class Curves {
  /** @param {string} title @param {string[]} names of the lines */
  constructor(title, names) {
    this.title = title;
    this.names = names;
    this.last = names.map((name, line) => element("span", { class: "muted", "data-line": String(line) }, name));
    /** @type {[number, number][][]} */
    this.lines = [];
    this.canvas = element("canvas", { role: "img" });
    this.canvas.addEventListener("theme", () => this.show(this.lines));
    this.foot = element("div", { class: "axis muted" });
    this.root = element(
      "figure",
      { class: "curve", hidden: true },
      element("figcaption", {}, element("span", {}, title), ...this.last),
      this.canvas,
      this.foot,
    );
  }

  /** @param {[number, number][][]} lines step and value */
  show(lines) {
    this.lines = lines;
    const points = lines.flat();
    this.root.hidden = points.length === 0;
    if (points.length === 0) return;
    const values = points.map(([, value]) => value);
    const range = {
      least: Math.min(...values),
      most: Math.max(...values),
      steps: Math.max(...points.map(([step]) => step)),
    };
    const told = lines.map((line, place) => {
      const last = line.at(-1);
      return last ? `${this.names[place]} ${number(last[1])}` : this.names[place];
    });
    for (const [place, text] of told.entries()) this.last[place].textContent = text;
    this.canvas.setAttribute("aria-label", `${this.title} after ${counted(range.steps, "step")}: ${told.join(", ")}`);
    this.foot.replaceChildren(
      element("span", {}, `${number(range.least)} – ${number(range.most)}`),
      element("span", {}, counted(range.steps, "step")),
    );
    this.#draw(lines, range);
  }

  /** @param {[number, number][][]} lines @param {{least: number, most: number, steps: number}} range */
  #draw(lines, { least, most, steps }) {
    const { canvas } = this;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const context = canvas.getContext("2d");
    if (context === null) return;
    context.scale(ratio, ratio);
    const [width, height] = [canvas.clientWidth - 12, canvas.clientHeight - 12];
    for (const [place, line] of lines.entries()) {
      context.strokeStyle = context.fillStyle = getComputedStyle(this.last[place], "::before").backgroundColor;
      context.lineWidth = place === 0 ? 1.5 : 2;
      context.beginPath();
      for (const [step, value] of line) {
        const x = 6 + (width * step) / Math.max(1, steps);
        const y = 6 + height * (1 - (value - least) / Math.max(most - least, 1e-12));
        context.lineTo(x, y);
        if (place > 0) context.fillRect(x - 2.5, y - 2.5, 5, 5);
      }
      context.stroke();
    }
  }
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
