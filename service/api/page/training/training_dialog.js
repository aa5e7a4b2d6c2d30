/** The dialog that starts a training with annotated stacks. */

import { button, element, field, openDialog } from "../core/elements.js";
import { json, Problem, requestOnce } from "../core/requests.js";
import { describeAnnotation, fetchAnnotations } from "./annotations.js";

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
