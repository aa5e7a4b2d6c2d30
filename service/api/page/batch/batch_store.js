/** Store for batches in this browser (IndexedDB), so that a batch and its jobs can be found after a reload of the page. */

import { Database, toPromise, withFallback } from "../core/database.js";

/** @typedef {import("./entries.js").Entry} Entry */
/** @typedef {Omit<Entry, "parts" | "upload" | "thumbnail" | "isBusy">} StoredEntry */
/**
 * @typedef {object} BatchRecord
 * @property {string} id
 * @property {string} name
 * @property {string} folder that contains all files, "" if there is none
 * @property {string} created ISO 8601
 * @property {Record<string, string>} parameters of all stacks: model and options
 * @property {import("./entries.js").SharedMetadata} shared
 * @property {StoredEntry[]} entries
 */

const DATABASE_NAME = "stackseg-batches";
const BATCHES = "batches";
const THUMBNAILS = "thumbnails";
const MAX_BATCHES = 20;

const database = new Database(DATABASE_NAME, { [BATCHES]: { keyPath: "id" }, [THUMBNAILS]: {} });

/** @param {string} id of a batch @returns {IDBKeyRange} the keys of its thumbnails */
function getThumbnailRange(id) {
  return IDBKeyRange.bound([id, 0], [id, Number.MAX_SAFE_INTEGER]);
}

/** @returns {Promise<BatchRecord[]>} newest first */
export async function loadBatches() {
  /** @type {BatchRecord[]} */
  const records = await withFallback(
    async () => toPromise((await database.openStore(BATCHES, "readonly")).getAll()),
    [],
  );
  return records.sort((first, second) => second.created.localeCompare(first.created));
}

/** @param {string} id @returns {Promise<BatchRecord | undefined>} */
export function loadBatch(id) {
  return withFallback(async () => toPromise((await database.openStore(BATCHES, "readonly")).get(id)), undefined);
}

/** Save a batch, and forget the oldest batches if there are too many. @param {BatchRecord} record */
export async function saveBatch(record) {
  await withFallback(async () => toPromise((await database.openStore(BATCHES, "readwrite")).put(record)), undefined);
}

/** Delete the oldest batches if there are too many. */
export async function deleteOldBatches() {
  const records = await loadBatches();
  await Promise.all(records.slice(MAX_BATCHES).map(({ id }) => deleteBatch(id)));
}

/** @param {string} id */
export async function deleteBatch(id) {
  await withFallback(async () => toPromise((await database.openStore(BATCHES, "readwrite")).delete(id)), undefined);
  await withFallback(
    async () => toPromise((await database.openStore(THUMBNAILS, "readwrite")).delete(getThumbnailRange(id))),
    undefined,
  );
}

/** @param {string} id of a batch @returns {Promise<Map<number, string>>} data URLs by index of the entry */
export function loadThumbnails(id) {
  return withFallback(async () => {
    const store = await database.openStore(THUMBNAILS, "readonly");
    const range = getThumbnailRange(id);
    const [keys, urls] = await Promise.all([toPromise(store.getAllKeys(range)), toPromise(store.getAll(range))]);
    return new Map(keys.map((key, index) => [Number(/** @type {IDBValidKey[]} */ (key)[1]), String(urls[index])]));
  }, new Map());
}

/** @param {string} id of a batch @param {number} index of the entry @param {string} url data URL */
export async function saveThumbnail(id, index, url) {
  await withFallback(
    async () => toPromise((await database.openStore(THUMBNAILS, "readwrite")).put(url, [id, index])),
    undefined,
  );
}

/** Find the batch that contains a stack or a job. @param {string} stack id @param {string} job id @returns {Promise<BatchRecord | undefined>} the newest one */
export async function findBatch(stack, job) {
  return (await loadBatches()).find(({ entries }) =>
    entries.some((entry) => (job !== "" && entry.job === job) || (stack !== "" && entry.stack === stack)),
  );
}
