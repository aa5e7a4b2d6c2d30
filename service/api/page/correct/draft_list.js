/** List of the annotations that were started from nothing and are saved in this browser. */

import { element } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import * as correctionStore from "../volumes/correction_store.js";

/** Create the list for the start screen. @param {() => void} onchange called after an annotation has been deleted @returns {Promise<HTMLElement | null>} null if there are no annotations */
export async function createDraftList(onchange) {
  const drafts = await correctionStore.loadDescriptions();
  if (drafts.length === 0) return null;
  drafts.sort(([, first], [, second]) => second.changed.localeCompare(first.changed));
  return element(
    "section",
    { class: "recent", "aria-labelledby": "drafts-title" },
    element("h2", { id: "drafts-title" }, "Annotations in this browser"),
    element("ul", {}, ...drafts.map(([key, draft]) => createDraftItem(key, draft, onchange))),
  );
}

/** @param {string} key @param {correctionStore.AnnotationDescription} draft @param {() => void} onchange */
function createDraftItem(key, { name, fragment, objectCount, regionText, changed }, onchange) {
  const deleteDraft = async () => {
    if (!confirm(`Delete the annotation of ${name} with ${formatCount(objectCount, "object")} from this browser?`))
      return;
    await correctionStore.forgetCorrections(key);
    onchange();
  };
  return element(
    "li",
    { class: "without-thumbnail" },
    element(
      "a",
      { class: "recent-text", href: `#${fragment}` },
      element("strong", {}, name),
      element(
        "span",
        { class: "muted" },
        `${formatCount(objectCount, "object")} · ${regionText} · ${formatAge(changed)}`,
      ),
    ),
    element(
      "button",
      { type: "button", class: "quiet icon", "aria-label": `Delete the annotation of ${name}`, onclick: deleteDraft },
      "×",
    ),
  );
}
