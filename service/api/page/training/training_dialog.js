/** The dialog that starts a training with annotated stacks. */

import { button, element, field, openDialog } from "../core/elements.js";
import { Problem, requestJson, requestWithoutPrompt } from "../core/requests.js";
import { describeAnnotation, fetchAnnotations } from "./annotations.js";

/**
 * Let the user choose a base model and annotated stacks, and start a training.
 * @param {number} maxMinutes longest duration of a training @param {string} [model] preselected base model
 */
export async function trainingDialog(maxMinutes, model = "") {
  const [annotations, response] = await Promise.all([fetchAnnotations(), requestJson("models")]);
  /** @type {Model[]} */
  const models = response.models;
  const names = models.map(({ name }) => name);
  const base = model.split("/")[0] || response.default;
  let suggestedName = unusedName(base, names);
  const changeBase = () => {
    if (nameInput.value === suggestedName) nameInput.value = suggestedName = unusedName(baseSelect.value, names);
    preselect(boxes, baseSelect.value, models);
  };
  const baseSelect = element(
    "select",
    { onchange: changeBase },
    ...names.map((name) => element("option", { value: name, selected: name === base }, name)),
  );
  const nameInput = element("input", {
    type: "text",
    value: suggestedName,
    required: true,
    pattern: "[a-z0-9][a-z0-9_\\-]*",
    title: "Lowercase letters, digits, - and _",
    maxLength: 64,
  });
  const minutes = element("input", {
    type: "number",
    value: String(Math.min(10, maxMinutes)),
    min: "0.01",
    max: String(maxMinutes),
    step: "any",
    required: true,
  });
  const boxes = makeBoxes(annotations);
  preselect(boxes, base, models);
  const problem = element("p", { class: "warning-text", role: "alert" });
  const start = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const selected = boxes.filter(({ box }) => box.checked).map(({ annotation }) => annotation.id);
    const body = JSON.stringify({
      model: baseSelect.value,
      annotations: selected,
      minutes: Number(minutes.value),
      name: nameInput.value,
    });
    try {
      if (selected.length === 0) throw new Problem("", "Select at least one annotated stack.", 0);
      const headers = { "Content-Type": "application/json" };
      const { id } = await (await requestWithoutPrompt("trainings", { method: "POST", body, headers })).json();
      dialog.close();
      location.hash = `training=${id}`;
    } catch (error) {
      problem.textContent = /** @type {Error} */ (error).message;
    }
  };
  const none = element(
    "p",
    { class: "muted" },
    "There are no annotated stacks yet. Correct a result and save it as an annotated stack first.",
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
          element(
            "span",
            { class: "small overlapping" },
            `same region as ${namesOf(annotation.overlaps, annotations)}`,
          ),
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
        "The training continues from the base model with the selected stacks and creates a new model. The base model does not change.",
      ),
      list,
      field("Base model", baseSelect),
      field("Name of the new model", nameInput),
      field("Minutes", minutes, element("span", { class: "muted small" }, "Segmentation requests have priority.")),
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

/** @typedef {import("openapi").ModelInfo} Model */
/** @typedef {{annotation: import("openapi").AnnotationReport, box: HTMLInputElement}[]} Boxes */

/**
 * Create a checkbox for each annotated stack. If stacks have labels for the same region, selecting one deselects the others,
 * because a training uses only one of them.
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
 * Select the stacks whose labels come from the same family of models, since other models segment other structures. If
 * stacks have labels for the same region, select the newest.
 * @param {Boxes} boxes @param {string} base @param {Model[]} models
 */
function preselect(boxes, base, models) {
  for (const { box } of boxes) box.checked = false;
  for (const { annotation, box } of boxes) {
    const { base_model: model, overlaps } = annotation;
    const isSameFamily = model === null || ancestorOf(model, models) === ancestorOf(base, models);
    box.checked = isSameFamily && !boxes.some((other) => other.box.checked && overlaps.includes(other.annotation.id));
  }
}

/** Follow the lineage of a model to its oldest ancestor. @param {string} model name, optionally with the version @param {Model[]} models */
function ancestorOf(model, models) {
  let [name] = model.split("/");
  // The number of steps is limited, because a reused name can make a model its own ancestor.
  for (const _ of models) {
    const parent = models.find((candidate) => candidate.name === name)?.lineage?.parent;
    if (!parent) return name;
    [name] = parent.split("/");
  }
  return name;
}

/** @param {string[]} ids @param {import("openapi").AnnotationReport[]} annotations */
function namesOf(ids, annotations) {
  const names = ids.map((id) => annotations.find((annotation) => annotation.id === id)?.name ?? "another stack");
  return `${names.join(", ")}; select only one of them`;
}

/** @param {string} base @param {string[]} names existing names */
function unusedName(base, names) {
  const stem = `${base.replace(/-\d+$/, "")}-`;
  let number = 2;
  while (names.includes(stem + number)) number += 1;
  return stem + number;
}
