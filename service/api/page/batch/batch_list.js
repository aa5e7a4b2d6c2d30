/** List of the batches in this browser, shown on the start screen. */

import { button, element } from "../core/elements.js";
import { formatAge, formatCount } from "../core/format.js";
import { deleteBatch, loadBatches } from "./batch_store.js";
import { getPhase } from "./entries.js";
import { closeBatch } from "./open_batches.js";

/** @typedef {import("./batch_store.js").BatchRecord} BatchRecord */

/** Create the list. @param {() => void} onchange called after a batch has been removed from the list @returns {Promise<HTMLElement | null>} null if there are no batches */
export async function createBatchList(onchange) {
  const records = await loadBatches();
  if (records.length === 0) return null;
  return element(
    "section",
    { class: "recent batches", "aria-labelledby": "batches-title" },
    element("h2", { id: "batches-title" }, "Batches in this browser"),
    element("ul", {}, ...records.map((record) => createItem(record, onchange))),
  );
}

/** @param {BatchRecord} record @param {() => void} onchange */
function createItem({ id, name, created, entries }, onchange) {
  const stacks = entries.filter(({ skipReason }) => skipReason === "");
  const doneCount = entries.filter((entry) => getPhase({ ...entry, ...UNLOADED }) === "done").length;
  const remove = async () => {
    const text = `Remove ${name} from this list? The service keeps its results until they expire, but this page no longer finds them.`;
    if (!confirm(text)) return;
    closeBatch(id);
    await deleteBatch(id);
    onchange();
  };
  const removeButton = button("×", remove, "quiet icon");
  removeButton.ariaLabel = `Remove ${name} from this list`;
  return element(
    "li",
    {},
    element(
      "a",
      { class: "recent-job", href: `#batch=${id}` },
      element(
        "span",
        { class: "recent-text" },
        element("strong", {}, name),
        element("span", { class: "muted" }, `${doneCount} of ${formatCount(stacks.length, "stack")} segmented`),
        element("span", { class: "muted" }, formatAge(created)),
      ),
    ),
    removeButton,
  );
}

const UNLOADED = { parts: [], upload: null, isBusy: false, thumbnail: "" };
