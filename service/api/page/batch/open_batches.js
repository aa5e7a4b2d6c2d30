/** The batches of this page. They continue while other views are open. */

import { Batch } from "./batch.js";
import { deleteOldBatches, loadBatch, loadThumbnails } from "./batch_store.js";
import { getFileName, getFolder } from "./entries.js";

/** The batches by id. @type {Map<string, Batch>} */
const openBatches = new Map();

/** Create a batch of the given files. If they are in one folder, the batch has the name of the folder. @param {import("./collect_files.js").FoundFile[]} found @param {string} model @returns {Batch} */
export function createBatch(found, model) {
  const folder = getFolder(found.map(({ path }) => path));
  const stacks = found.filter(({ skipReason }) => skipReason === "");
  const [first] = stacks.length > 0 ? stacks : found;
  const otherCount = Math.max(stacks.length - 1, 0);
  const name = otherCount > 0 ? `${getFileName(first.path)} and ${otherCount} more` : getFileName(first.path);
  const batch = new Batch({
    id: crypto.getRandomValues(new Uint32Array(3)).join("-"),
    name: folder || name,
    folder,
    created: new Date().toISOString(),
    parameters: { model },
    shared: { channel: "", time: "", link: "", voxel_size: "" },
    entries: [],
  });
  batch.addFiles(found);
  openBatches.set(batch.id, batch);
  batch.save();
  deleteOldBatches();
  return batch;
}

/** Return a batch of this page, or restore it from this browser's storage. @param {string} id @returns {Promise<Batch | null>} null if it is not stored */
export async function openBatch(id) {
  const record = openBatches.has(id) ? undefined : await loadBatch(id);
  if (record !== undefined) openBatches.set(id, new Batch(record, await loadThumbnails(id)));
  return openBatches.get(id) ?? null;
}

/** Forget a batch, and cancel its uploads. @param {string} id */
export function closeBatch(id) {
  openBatches.get(id)?.end();
  openBatches.delete(id);
}
