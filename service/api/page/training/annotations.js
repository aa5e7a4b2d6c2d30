/** Annotated stacks: images with corrected labels that the service stores for training. */

import { button, element, field, openDialog } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import { buildQuery, request, requestJson } from "../core/requests.js";
import { checkAnnotation, describeRegion, encodeAnnotation } from "../volumes/annotated_region.js";
import { encodeNpy, gzip } from "../volumes/label_files.js";

/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {import("../volumes/annotated_region.js").Region} Region */

/** @typedef {import("openapi").AnnotationReport} Annotation */

/** @returns {Promise<Annotation[]>} */
export async function fetchAnnotations() {
  return (await requestJson("annotations")).annotations;
}

/**
 * Open a dialog that saves labels together with their stack. The dialog asks for a name, and shows the region in which every
 * object is labeled.
 * @param {{editor: LabelEditor, region: Region, query: Record<string, unknown>, name: string, earlier: Annotation | null}} annotation query: parameters that select the stack; name: initial name; earlier: newest annotated stack that was saved from the same labels
 * @returns {Promise<Annotation | null>} null if the user canceled
 */
export function openSaveAnnotationDialog({ editor, region, query, name, earlier }) {
  const nameInput = element("input", { type: "text", value: name, required: true, maxLength: 100 });
  const { problem, warning } = checkAnnotation(editor, region);
  const problemText = element("p", { class: "warning-text", role: "alert" });
  const replaceCheckbox = element("input", { type: "checkbox" });
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
            const annotation = encodeAnnotation(editor, region);
            const body = await gzip(encodeNpy(annotation.labels));
            const parameters = buildQuery({ ...query, ...annotation.query, name: nameInput.value });
            const headers = { "Content-Type": "application/x-npy", "Content-Encoding": "gzip" };
            savedAnnotation = await requestJson(`annotations?${parameters}`, { method: "POST", body, headers });
            if (earlier && replaceCheckbox.checked) await request(`annotations/${earlier.id}`, { method: "DELETE" });
            dialog.close();
          } catch (error) {
            const { message, status } = /** @type {import("../core/requests.js").Problem} */ (error);
            problemText.textContent = status === 404 ? `${message} Save the labels as a file instead.` : message;
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
      // Without planes or a box, the problem states what to do.
      problem === "" &&
        element(
          "p",
          {},
          region.kind === "objects"
            ? "Only some objects are labeled."
            : `Every object is labeled in ${describeRegion(region)}.`,
        ),
      element("p", { class: "muted small" }, REGION_EXPLANATIONS[region.kind]),
      earlier &&
        element(
          "label",
          { class: "inline-label" },
          replaceCheckbox,
          `Delete the earlier version, ${earlier.name} (${describeAnnotation(earlier)})`,
        ),
      warning && element("p", { class: "warning-text" }, warning),
      problemText,
      element(
        "div",
        { class: "row end" },
        button("Cancel", () => dialog.close(), "secondary"),
        saveButton,
      ),
    );
    problemText.textContent = problem;
    saveButton.disabled = problem !== "";
    const dialog = openDialog("Save as annotated stack", form);
    dialog.addEventListener("close", () => resolve(savedAnnotation));
  });
}

/** What training makes of the voxels without a label. @type {Record<Region["kind"], string>} */
const REGION_EXPLANATIONS = {
  whole: "Training treats everything without a label as background.",
  box: "Training uses only the box, and treats everything without a label in it as background.",
  planes:
    "Training treats everything without a label in these planes as background. Outside these planes, it uses only the labeled objects.",
  objects: "Training treats only a narrow rim around the labeled objects as background. Everything else is unknown.",
};

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
        element("h2", { id: "annotated-title" }, "Annotated stacks on the server"),
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
export function describeAnnotation({ objects, changes, region, ignore_label, partial, base_model: model, created }) {
  const properties = [
    formatCount(objects, "object"),
    changes ? formatCount(changes, model ? "correction" : "change") : "",
    ignore_label ? "some planes" : region && !partial ? "part of the stack" : "",
    partial ? "only some objects" : "",
  ];
  return [...properties, model, formatAge(created)].filter(Boolean).join(" · ");
}

/** @param {Annotation} annotation @param {(annotation: Annotation) => void} deleteAnnotation */
function createAnnotationItem(annotation, deleteAnnotation) {
  return element(
    "li",
    { class: "without-thumbnail" },
    element(
      "a",
      { class: "recent-text", href: `#annotated=${annotation.id}`, title: "Continue the annotation" },
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
