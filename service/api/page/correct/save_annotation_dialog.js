/** Dialog that saves labels as an annotated stack, with its name and the region in which every object is labeled. */

import { button, element, field, formatMessage, openDialog } from "../core/elements.js";
import { buildQuery, request, requestJson } from "../core/requests.js";
import { describeAnnotation } from "../training/annotation_list.js";
import { checkAnnotation, describeRegion, encodeAnnotation } from "../volumes/annotated_region.js";
import { encodeNpy, gzip } from "../volumes/label_files.js";

/** @typedef {import("../volumes/label_edit.js").LabelEditor} LabelEditor */
/** @typedef {import("../volumes/annotated_region.js").Region} Region */
/** @typedef {import("openapi").AnnotationReport} Annotation */

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
            const text = status === 404 ? `${message} Save the labels as a file instead.` : message;
            problemText.replaceChildren(formatMessage(text));
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
