/** Annotated stacks: images with corrected labels that the service stores for training. */

import { button, element, field, openDialog } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import { buildQuery, request, requestJson } from "../core/requests.js";
import { encodeNpy, gzip } from "../volumes/label_files.js";

/** @typedef {import("../volumes/planes.js").Volume} Volume */

/** @typedef {import("openapi").AnnotationReport} Annotation */

/** @returns {Promise<Annotation[]>} */
export async function fetchAnnotations() {
  return (await requestJson("annotations")).annotations;
}

/**
 * Open a dialog that saves corrected labels together with their stack. The dialog asks for a name and for the part of
 * the stack that the user has checked.
 * @param {{labels: Volume, correctionCount: number, stack: string, job: string, time: number | undefined, name: string}} corrections stack and job: ids; time: time point if the job segmented a time series, otherwise undefined; name: initial name
 * @returns {Promise<Annotation | null>} null if the user canceled
 */
export function openSaveAnnotationDialog({ labels, correctionCount, stack, job, time, name }) {
  const nameInput = element("input", { type: "text", value: name, required: true, maxLength: 100 });
  const partFields = createPartFields(labels.shape);
  const problemText = element("p", { class: "warning-text", role: "alert" });
  return new Promise((resolve) => {
    /** @type {Annotation | null} */
    let savedAnnotation = null;
    const saveButton = element("button", { type: "submit", class: "primary" }, "Save");
    const form = element(
      "form",
      {
        class: "dialog-form",
        onsubmit: async (/** @type {Event} */ event) => {
          event.preventDefault();
          saveButton.disabled = true;
          saveButton.textContent = "Sending the labels";
          try {
            const body = await gzip(encodeNpy(labels));
            const query = buildQuery({
              stack,
              job,
              time,
              name: nameInput.value,
              changes: correctionCount,
              region: partFields.getRegion(),
            });
            const headers = { "Content-Type": "application/x-npy", "Content-Encoding": "gzip" };
            savedAnnotation = await requestJson(`annotations?${query}`, { method: "POST", body, headers });
            dialog.close();
          } catch (error) {
            const { message, status } = /** @type {import("../core/requests.js").Problem} */ (error);
            problemText.textContent =
              status === 404 ? `${message} Save the corrected labels as a file instead.` : message;
            saveButton.disabled = false;
            saveButton.textContent = "Save";
          }
        },
      },
      element(
        "p",
        { class: "muted" },
        "The stack and its labels will be saved on the server, and you can train models with them.",
      ),
      field("Name", nameInput),
      partFields.root,
      problemText,
      element(
        "div",
        { class: "row end" },
        button("Cancel", () => dialog.close(), "secondary"),
        saveButton,
      ),
    );
    const dialog = openDialog("Save as annotated stack", form);
    dialog.addEventListener("close", () => resolve(savedAnnotation));
  });
}

/** Create the fields for the part of a stack that the user checked. @param {import("../volumes/planes.js").Triple} shape */
function createPartFields(shape) {
  const inputs = ["Planes", "Rows", "Columns"].map((text, axis) => {
    /** @param {string} boundName @param {number} value */
    const createInput = (boundName, value) =>
      element("input", {
        type: "number",
        min: "1",
        max: String(shape[axis]),
        value: String(value),
        required: true,
        "aria-label": `${text}, ${boundName}`,
      });
    return { text, first: createInput("first", 1), last: createInput("last", shape[axis]) };
  });
  const rangeInputs = element(
    "div",
    { class: "part", hidden: true },
    ...inputs.flatMap(({ text, first, last }) => [element("span", { class: "muted" }, text), first, "to", last]),
  );
  const partCheckbox = element("input", {
    type: "checkbox",
    onchange: () => (rangeInputs.hidden = !partCheckbox.checked),
  });
  const root = element(
    "div",
    { class: "field" },
    element(
      "label",
      { class: "inline-label" },
      partCheckbox,
      "I checked only part of the stack. Train only on this part.",
    ),
    rangeInputs,
  );
  const getRegion = () =>
    partCheckbox.checked ? inputs.map(({ first, last }) => `${Number(first.value) - 1}:${last.value}`).join(",") : "";
  return { root, getRegion };
}

/**
 * Create the list of annotated stacks for the start screen.
 * @param {(() => void) | null} openTrainingDialog null if training is not available
 * @returns {Promise<HTMLElement | null>} null if there are no annotated stacks
 */
export async function createAnnotationsList(openTrainingDialog) {
  const annotations = await fetchAnnotations();
  if (annotations.length === 0) return null;
  const root = element("section", { class: "recent", "aria-labelledby": "annotated-title" });
  const draw = () => {
    root.hidden = annotations.length === 0;
    root.replaceChildren(
      element(
        "div",
        { class: "row between" },
        element("h2", { id: "annotated-title" }, "Annotated stacks"),
        openTrainingDialog && button("Improve a model with these stacks", openTrainingDialog, "secondary"),
      ),
      element("ul", {}, ...annotations.map((annotation) => createAnnotationItem(annotation, deleteAnnotation))),
    );
  };
  /** @param {Annotation} annotation */
  async function deleteAnnotation(annotation) {
    if (!confirm(`Delete ${annotation.name} and its corrected labels from the server?`)) return;
    await request(`annotations/${annotation.id}`, { method: "DELETE" });
    annotations.splice(annotations.indexOf(annotation), 1);
    draw();
  }
  draw();
  return root;
}

/** @param {Annotation} annotation */
export function describeAnnotation({ objects, changes, region, base_model: model, created }) {
  const properties = [
    formatCount(objects, "object"),
    changes ? formatCount(changes, "correction") : "",
    region ? "part of the stack" : "",
  ];
  return [...properties, model, formatAge(created)].filter(Boolean).join(" · ");
}

/** @param {Annotation} annotation @param {(annotation: Annotation) => void} deleteAnnotation */
function createAnnotationItem(annotation, deleteAnnotation) {
  return element(
    "li",
    { class: "without-thumbnail" },
    element(
      "span",
      { class: "recent-text" },
      element("strong", {}, annotation.name),
      element("span", { class: "muted" }, describeAnnotation(annotation)),
    ),
    element(
      "button",
      {
        type: "button",
        class: "quiet icon",
        "aria-label": `Delete ${annotation.name}`,
        onclick: () => deleteAnnotation(annotation),
      },
      "×",
    ),
  );
}
