/** Store for batches in this browser (IndexedDB), so that a batch and its jobs can be found after a reload of the page. */

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

/** @type {Promise<IDBDatabase> | null} */
let databasePromise = null;

/** Convert a database request to a promise. @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function toPromise(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** @param {string} storeName @param {IDBTransactionMode} mode @returns {Promise<IDBObjectStore>} */
async function openStore(storeName, mode) {
  if (databasePromise === null) {
    const request = indexedDB.open(DATABASE_NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(BATCHES, { keyPath: "id" });
      request.result.createObjectStore(THUMBNAILS);
    };
    databasePromise = toPromise(request);
  }
  return (await databasePromise).transaction(storeName, mode).objectStore(storeName);
}

/** Access the database, or return a fallback if the browser does not store data, as in private windows. @template T @param {() => Promise<T>} access @param {T} fallback @returns {Promise<T>} */
async function withFallback(access, fallback) {
  try {
    return await access();
  } catch {
    return fallback;
  }
}

/** @param {string} id of a batch @returns {IDBKeyRange} the keys of its thumbnails */
function getThumbnailRange(id) {
  return IDBKeyRange.bound([id, 0], [id, Number.MAX_SAFE_INTEGER]);
}

/** @returns {Promise<BatchRecord[]>} newest first */
export async function loadBatches() {
  /** @type {BatchRecord[]} */
  const records = await withFallback(async () => toPromise((await openStore(BATCHES, "readonly")).getAll()), []);
  return records.sort((first, second) => second.created.localeCompare(first.created));
}

/** @param {string} id @returns {Promise<BatchRecord | undefined>} */
export function loadBatch(id) {
  return withFallback(async () => toPromise((await openStore(BATCHES, "readonly")).get(id)), undefined);
}

/** Save a batch, and forget the oldest batches if there are too many. @param {BatchRecord} record */
export async function saveBatch(record) {
  await withFallback(async () => toPromise((await openStore(BATCHES, "readwrite")).put(record)), undefined);
}

/** Delete the oldest batches if there are too many. */
export async function deleteOldBatches() {
  const records = await loadBatches();
  await Promise.all(records.slice(MAX_BATCHES).map(({ id }) => deleteBatch(id)));
}

/** @param {string} id */
export async function deleteBatch(id) {
  await withFallback(async () => toPromise((await openStore(BATCHES, "readwrite")).delete(id)), undefined);
  await withFallback(
    async () => toPromise((await openStore(THUMBNAILS, "readwrite")).delete(getThumbnailRange(id))),
    undefined,
  );
}

/** @param {string} id of a batch @returns {Promise<Map<number, string>>} data URLs by index of the entry */
export function loadThumbnails(id) {
  return withFallback(async () => {
    const store = await openStore(THUMBNAILS, "readonly");
    const range = getThumbnailRange(id);
    const [keys, urls] = await Promise.all([toPromise(store.getAllKeys(range)), toPromise(store.getAll(range))]);
    return new Map(keys.map((key, index) => [Number(/** @type {IDBValidKey[]} */ (key)[1]), String(urls[index])]));
  }, new Map());
}

/** @param {string} id of a batch @param {number} index of the entry @param {string} url data URL */
export async function saveThumbnail(id, index, url) {
  await withFallback(
    async () => toPromise((await openStore(THUMBNAILS, "readwrite")).put(url, [id, index])),
    undefined,
  );
}

/** Find the batch that contains a stack or a job. @param {string} stack id @param {string} job id @returns {Promise<BatchRecord | undefined>} the newest one */
export async function findBatch(stack, job) {
  return (await loadBatches()).find(({ entries }) =>
    entries.some((entry) => (job !== "" && entry.job === job) || (stack !== "" && entry.stack === stack)),
  );
}
