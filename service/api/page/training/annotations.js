/** Annotated stacks: images with corrected labels that the service stores for training. */

import { button, element, field, openDialog } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import { buildQuery, request, requestJson } from "../core/requests.js";
import { asNpy, gzip } from "../volumes/label_files.js";

/** @typedef {import("../volumes/planes.js").Volume} Volume */

/** @typedef {import("openapi").AnnotationReport} Annotation */

/** @returns {Promise<Annotation[]>} */
export async function fetchAnnotations() {
  return (await requestJson("annotations")).annotations;
}

/**
 * Ask for a name and the checked part, and save corrected labels with their stack.
 * @param {{labels: Volume, changes: number, stack: string, job: string, time: number | undefined, name: string}} corrections changes: their number; time: the time point of a series
 * @returns {Promise<Annotation | null>} null if the user canceled
 */
export function saveAnnotationDialog({ labels, changes, stack, job, time, name }) {
  const nameInput = element("input", { type: "text", value: name, required: true, maxLength: 100 });
  const part = partFields(labels.shape);
  const problem = element("p", { class: "warning-text", role: "alert" });
  return new Promise((resolve) => {
    /** @type {Annotation | null} */
    let report = null;
    const save = element("button", { type: "submit", class: "primary" }, "Save");
    const form = element(
      "form",
      {
        class: "dialog-form",
        onsubmit: async (/** @type {Event} */ event) => {
          event.preventDefault();
          save.disabled = true;
          save.textContent = "Sending the labels";
          try {
            const body = await gzip(asNpy(labels));
            const query = buildQuery({ stack, job, time, name: nameInput.value, changes, region: part.region() });
            const headers = { "Content-Type": "application/x-npy", "Content-Encoding": "gzip" };
            report = await requestJson(`annotations?${query}`, { method: "POST", body, headers });
            dialog.close();
          } catch (error) {
            const { message, status } = /** @type {import("../core/requests.js").Problem} */ (error);
            problem.textContent = status === 404 ? `${message} Save the corrected labels as a file instead.` : message;
            save.disabled = false;
            save.textContent = "Save";
          }
        },
      },
      element(
        "p",
        { class: "muted" },
        "The stack and its labels will be saved on the service, and you can train models with them.",
      ),
      field("Name", nameInput),
      part.root,
      problem,
      element(
        "div",
        { class: "row end" },
        button("Cancel", () => dialog.close(), "secondary"),
        save,
      ),
    );
    const dialog = openDialog("Save as annotated stack", form);
    dialog.addEventListener("close", () => resolve(report));
  });
}

/** Create the fields for the checked part of a stack. @param {import("../volumes/planes.js").Triple} shape */
function partFields(shape) {
  const inputs = ["Planes", "Rows", "Columns"].map((text, axis) => {
    /** @param {string} end @param {number} value */
    const input = (end, value) =>
      element("input", {
        type: "number",
        min: "1",
        max: String(shape[axis]),
        value: String(value),
        required: true,
        "aria-label": `${text}, ${end}`,
      });
    return { text, first: input("first", 1), last: input("last", shape[axis]) };
  });
  const box = element(
    "div",
    { class: "part", hidden: true },
    ...inputs.flatMap(({ text, first, last }) => [element("span", { class: "muted" }, text), first, "to", last]),
  );
  const only = element("input", { type: "checkbox", onchange: () => (box.hidden = !only.checked) });
  const root = element(
    "div",
    { class: "field" },
    element("label", { class: "slim" }, only, "I checked only part of the stack. Train only on this part."),
    box,
  );
  const region = () =>
    only.checked ? inputs.map(({ first, last }) => `${Number(first.value) - 1}:${last.value}`).join(",") : "";
  return { root, region };
}

/**
 * Create the list of annotated stacks for the start screen.
 * @param {{improve: (() => void) | null}} actions improve: opens the training dialog, null if training is not available
 * @returns {Promise<HTMLElement | null>} null if there are none
 */
export async function annotationsList({ improve }) {
  const list = await fetchAnnotations();
  if (list.length === 0) return null;
  const root = element("section", { class: "recent", "aria-labelledby": "annotated-title" });
  const show = () => {
    root.hidden = list.length === 0;
    root.replaceChildren(
      element(
        "div",
        { class: "row between" },
        element("h2", { id: "annotated-title" }, "Annotated stacks"),
        improve && button("Improve a model with these", improve, "secondary"),
      ),
      element("ul", {}, ...list.map((annotation) => item(annotation, remove))),
    );
  };
  /** @param {Annotation} annotation */
  async function remove(annotation) {
    if (!confirm(`Delete ${annotation.name} and its corrected labels from the service?`)) return;
    await request(`annotations/${annotation.id}`, { method: "DELETE" });
    list.splice(list.indexOf(annotation), 1);
    show();
  }
  show();
  return root;
}

/** @param {Annotation} annotation */
export function describeAnnotation({ objects, changes, region, base_model: model, created }) {
  const parts = [
    formatCount(objects, "object"),
    changes ? formatCount(changes, "correction") : "",
    region ? "part" : "",
  ];
  return [...parts, model, formatAge(created)].filter(Boolean).join(" · ");
}

/** @param {Annotation} annotation @param {(annotation: Annotation) => void} remove */
function item(annotation, remove) {
  return element(
    "li",
    { class: "annotated" },
    element(
      "span",
      { class: "recent-words" },
      element("strong", {}, annotation.name),
      element("span", { class: "muted" }, describeAnnotation(annotation)),
    ),
    element(
      "button",
      {
        type: "button",
        class: "quiet icon",
        "aria-label": `Delete ${annotation.name}`,
        onclick: () => remove(annotation),
      },
      "×",
    ),
  );
}
