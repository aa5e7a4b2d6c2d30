/** List of the annotated stacks: images with corrected labels that the service stores for training. */

import { button, element } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import { request, requestJson } from "../core/requests.js";

/** @typedef {import("openapi").AnnotationReport} Annotation */

/** @returns {Promise<Annotation[]>} */
export async function fetchAnnotations() {
  return (await requestJson("annotations")).annotations;
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
