/** Dialog that starts a training run on annotated stacks. */

import { button, element, field, formatMessage, openDialog } from "../core/elements.js";
import { Problem, requestJson, requestWithoutPrompt } from "../core/requests.js";
import { describeAnnotation, fetchAnnotations } from "./annotation_list.js";

/** Structures that a model can learn, with the values of `target` in requests. The empty value is not sent. */
const TARGETS = [
  ["", "The same as before"],
  ["boundaries", "Boundaries, for objects that fill the stack, such as cells in a tissue"],
  ["affinities", "Boundaries with gaps, such as in electron microscopy"],
];

/**
 * Open a dialog in which the user selects a base model and annotated stacks and starts a training run.
 * @param {number} maxMinutes maximum duration of a training run @param {string} [model] preselected base model
 */
export async function openTrainingDialog(maxMinutes, model = "") {
  const [annotations, response] = await Promise.all([fetchAnnotations(), requestJson("models")]);
  /** @type {Model[]} */
  const models = response.models;
  const names = models.map(({ name }) => name);
  const initialBaseModel = model.split("/")[0] || response.default;
  let suggestedName = findUnusedName(initialBaseModel, names);
  const onBaseModelChange = () => {
    if (nameInput.value === suggestedName)
      nameInput.value = suggestedName = findUnusedName(baseModelSelect.value, names);
    preselectStacks(checkboxes, baseModelSelect.value, models);
  };
  const baseModelSelect = element(
    "select",
    { onchange: onBaseModelChange },
    ...names.map((name) => element("option", { value: name, selected: name === initialBaseModel }, name)),
  );
  const nameInput = element("input", {
    type: "text",
    value: suggestedName,
    required: true,
    pattern: "[a-z0-9][a-z0-9_\\-]*",
    title: "Lowercase letters, digits, - and _",
    maxLength: 64,
  });
  const minutesInput = element("input", {
    type: "number",
    value: String(Math.min(10, maxMinutes)),
    min: "0.01",
    max: String(maxMinutes),
    step: "any",
    required: true,
  });
  const targetSelect = element("select", {}, ...TARGETS.map(([value, text]) => element("option", { value }, text)));
  const partialCheckbox = element("input", { type: "checkbox" });
  const checkboxes = createCheckboxes(annotations);
  preselectStacks(checkboxes, initialBaseModel, models);
  const problemText = element("p", { class: "warning-text", role: "alert" });
  const onsubmit = async (/** @type {Event} */ event) => {
    event.preventDefault();
    const selectedIds = checkboxes.filter(({ checkbox }) => checkbox.checked).map(({ annotation }) => annotation.id);
    const body = JSON.stringify({
      model: baseModelSelect.value,
      annotations: selectedIds,
      minutes: Number(minutesInput.value),
      name: nameInput.value,
      partial: partialCheckbox.checked,
      target: targetSelect.value || undefined,
    });
    try {
      if (selectedIds.length === 0) throw new Problem("", "Select at least one annotated stack.", 0);
      const headers = { "Content-Type": "application/json" };
      const { id } = await (await requestWithoutPrompt("trainings", { method: "POST", body, headers })).json();
      dialog.close();
      location.hash = `training=${id}`;
    } catch (error) {
      problemText.replaceChildren(formatMessage(error));
    }
  };
  const emptyText = element(
    "p",
    { class: "muted" },
    "There are no annotated stacks yet. Correct a result and save it as an annotated stack first.",
  );
  const stackList = element(
    "fieldset",
    { class: "field choices" },
    element("legend", { class: "field-name" }, "Annotated stacks"),
    ...checkboxes.map(({ annotation, checkbox }) =>
      element(
        "label",
        { class: "choice" },
        checkbox,
        element("span", {}, annotation.name),
        element("span", { class: "muted small" }, describeAnnotation(annotation)),
        annotation.overlaps.length > 0 &&
          element(
            "span",
            { class: "small overlapping" },
            `same region as ${describeOverlaps(annotation.overlaps, annotations)}`,
          ),
      ),
    ),
    annotations.length === 0 && emptyText,
  );
  const dialog = openDialog(
    "Improve a model",
    element(
      "form",
      { class: "dialog-form", onsubmit },
      element(
        "p",
        { class: "muted" },
        "Training continues from the base model on the selected stacks and creates a new model. The base model does not change.",
      ),
      stackList,
      element(
        "label",
        { class: "choice" },
        partialCheckbox,
        element("span", {}, "Only some of the objects have correct labels"),
        element("span", { class: "muted small" }, "Unlabeled regions then do not count as background."),
      ),
      field("Base model", baseModelSelect),
      field("What the new model learns", targetSelect),
      field("Name of the new model", nameInput),
      field(
        "Training time in minutes",
        minutesInput,
        element("span", { class: "muted small" }, "Segmentation requests have priority."),
      ),
      problemText,
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
/** @typedef {{annotation: import("openapi").AnnotationReport, checkbox: HTMLInputElement}[]} StackCheckboxes */

/**
 * Create a checkbox for each annotated stack. If stacks have labels for the same region, selecting one deselects the
 * others, because a training run uses only one of them.
 * @param {import("openapi").AnnotationReport[]} annotations newest first @returns {StackCheckboxes}
 */
function createCheckboxes(annotations) {
  const checkboxes = annotations.map((annotation) => {
    const checkbox = element("input", {
      type: "checkbox",
      onchange: () => checkbox.checked && uncheck(annotation.overlaps),
    });
    return { annotation, checkbox };
  });
  /** @param {string[]} ids */
  const uncheck = (ids) => {
    for (const { annotation, checkbox } of checkboxes) if (ids.includes(annotation.id)) checkbox.checked = false;
  };
  return checkboxes;
}

/**
 * Check the stacks whose labels come from the same family of models as the base model, because other families segment
 * different structures. If stacks have labels for the same region, check only the newest stack.
 * @param {StackCheckboxes} checkboxes @param {string} baseModel @param {Model[]} models
 */
function preselectStacks(checkboxes, baseModel, models) {
  for (const { checkbox } of checkboxes) checkbox.checked = false;
  for (const { annotation, checkbox } of checkboxes) {
    const { base_model: model, overlaps } = annotation;
    const isSameFamily = model === null || findOldestAncestor(model, models) === findOldestAncestor(baseModel, models);
    checkbox.checked =
      isSameFamily && !checkboxes.some((other) => other.checkbox.checked && overlaps.includes(other.annotation.id));
  }
}

/** Return the name of the oldest ancestor of a model. @param {string} model name, with or without the version @param {Model[]} models */
function findOldestAncestor(model, models) {
  let [name] = model.split("/");
  // The number of steps is limited, because a reused name can make a model its own ancestor.
  for (const _ of models) {
    const parent = models.find((candidate) => candidate.name === name)?.lineage?.parent;
    if (!parent) return name;
    [name] = parent.split("/");
  }
  return name;
}

/** @param {string[]} ids of annotated stacks for the same region @param {import("openapi").AnnotationReport[]} annotations all annotated stacks */
function describeOverlaps(ids, annotations) {
  const names = ids.map((id) => annotations.find((annotation) => annotation.id === id)?.name ?? "another stack");
  return `${names.join(", ")}; select only one of them`;
}

/** Return an unused name for a new model. @param {string} baseModel name of the base model @param {string[]} names existing names */
function findUnusedName(baseModel, names) {
  const stem = `${baseModel.replace(/-\d+$/, "")}-`;
  let suffix = 2;
  while (names.includes(stem + suffix)) suffix += 1;
  return stem + suffix;
}
