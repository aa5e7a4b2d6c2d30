/** Stores corrections in this browser (IndexedDB), so that they survive a reload of the page. */

/** @typedef {import("./label_edit.js").Edit} Edit */
/**
 * Labels before any correction. They remain available after the service has deleted the result.
 * @typedef {object} OriginalLabels
 * @property {Blob} zipped label values in C order, gzip-compressed
 * @property {number} bytes number of bytes per label value @property {import("./planes.js").Triple} shape
 * @property {import("openapi").VoxelSize | null} voxelSize
 */

const DATABASE_NAME = "stackseg-corrections";
const STORE_NAME = "edits";
// Record keys are [key of the result, number]. Numbers from 0 are corrections. Negative numbers are other data of the result.
/** Number of the record with the id of the tab that corrects the result. */
const OWNER_NUMBER = -1;
/** Number of the record with the ids of the annotated stacks that were created from the result in this browser. */
const ANNOTATIONS_NUMBER = -2;
/** Number of the record with the labels before any correction. */
const ORIGINAL_LABELS_NUMBER = -3;
const TAB_ID = `${Date.now()}-${Math.random()}`;
/** How long to wait for replies from other tabs. */
const REPLY_TIMEOUT_MILLISECONDS = 1000;
/** Keys of the results that this tab corrects. @type {Set<string>} */
const ownedKeys = new Set();

/** Convert a database request to a promise. @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
function toPromise(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** @type {Promise<IDBDatabase> | null} */
let database = null;

/** @param {IDBTransactionMode} mode @returns {Promise<IDBObjectStore>} */
async function openStore(mode) {
  if (database === null) {
    const request = indexedDB.open(DATABASE_NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE_NAME);
    database = toPromise(request);
  }
  return (await database).transaction(STORE_NAME, mode).objectStore(STORE_NAME);
}

/** Return the key of a result's corrections. @param {import("openapi").JobReport} job @param {number} time time point, used if the job is a series */
export function makeKey(job, time) {
  return job.time_points ? `${job.id}@${time}` : job.id;
}

/** @param {string} key of a result, or of one time point of a series @returns {IDBKeyRange} the keys of its corrections */
function correctionRange(key) {
  return IDBKeyRange.bound([key, 0], [key, Number.MAX_SAFE_INTEGER]);
}

/** Access the database. Return a fallback if the browser does not store data, as in private windows. @template T @param {() => Promise<T>} access @param {T} fallback @returns {Promise<T>} */
async function withFallback(access, fallback) {
  try {
    return await access();
  } catch {
    return fallback;
  }
}

/** @param {string} key @returns {Promise<Edit[]>} the corrections of a result, without those that were undone */
export function load(key) {
  return withFallback(
    async () => toPromise((await openStore("readonly")).getAll(correctionRange(key))),
    /** @type {Edit[]} */ ([]),
  );
}

/** @param {string} key @returns {Promise<number>} the number of stored corrections of a result */
export function count(key) {
  return withFallback(async () => toPromise((await openStore("readonly")).count(correctionRange(key))), 0);
}

/**
 * Store a correction under its number, and delete all later corrections. If `edit` is null, only delete the corrections
 * from this number on.
 * @param {string} key @param {number} number @param {Edit | null} edit
 * @returns {Promise<"saved" | "owned-by-other-tab" | "unavailable">} owned-by-other-tab: nothing was written
 */
export function save(key, number, edit) {
  return withFallback(async () => {
    const edits = await openStore("readwrite");
    const owner = await toPromise(edits.get([key, OWNER_NUMBER]));
    if (owner !== undefined && owner !== TAB_ID) return "owned-by-other-tab";
    edits.delete(IDBKeyRange.bound([key, number], [key, Number.MAX_SAFE_INTEGER]));
    if (edit !== null) await toPromise(edits.put(edit, [key, number]));
    return "saved";
  }, "unavailable");
}

/** @param {string} job @returns {Promise<string[]>} ids of the annotated stacks created from a result in this browser */
export function loadAnnotationIds(job) {
  return withFallback(
    async () => (await toPromise((await openStore("readonly")).get([job, ANNOTATIONS_NUMBER]))) ?? [],
    [],
  );
}

/** Record that an annotated stack was created from a result. @param {string} job @param {string} annotation id */
export async function addAnnotation(job, annotation) {
  const existingIds = await loadAnnotationIds(job);
  await withFallback(
    async () => toPromise((await openStore("readwrite")).put([...existingIds, annotation], [job, ANNOTATIONS_NUMBER])),
    undefined,
  );
}

/** @returns {Promise<Map<string, number>>} the number of stored corrections by key */
export function countAll() {
  return withFallback(async () => {
    const keys = /** @type {[string, number][]} */ (await toPromise((await openStore("readonly")).getAllKeys()));
    const countByKey = new Map();
    for (const [key, number] of keys) if (number >= 0) countByKey.set(key, (countByKey.get(key) ?? 0) + 1);
    return countByKey;
  }, new Map());
}

/** @param {string} key @returns {Promise<OriginalLabels | undefined>} the labels before any correction */
export function loadOriginalLabels(key) {
  return withFallback(
    async () => toPromise((await openStore("readonly")).get([key, ORIGINAL_LABELS_NUMBER])),
    undefined,
  );
}

/** @param {string} key @param {OriginalLabels} labels */
export function saveOriginalLabels(key, labels) {
  return withFallback(
    async () => toPromise((await openStore("readwrite")).put(labels, [key, ORIGINAL_LABELS_NUMBER])),
    undefined,
  );
}

/** Delete everything stored for a job and all of its time points. @param {string} job */
export function forget(job) {
  return withFallback(async () => {
    const edits = await openStore("readwrite");
    for (const [firstKey, lastKey] of [
      [job, job],
      [`${job}@`, `${job}@\uffff`],
    ])
      edits.delete(IDBKeyRange.bound([firstKey, ORIGINAL_LABELS_NUMBER], [lastKey, Number.MAX_SAFE_INTEGER]));
  }, undefined);
}

/**
 * Claim a result for this tab, so that only one tab corrects it at a time. The claim is stored with the corrections and
 * checked at every write, because Web Locks are available only over HTTPS. Claims of closed tabs are ignored.
 * @param {string} key @param {boolean} force whether to claim the result even if another open tab corrects it
 * @returns {Promise<boolean>} false if another open tab corrects the result
 */
export async function claim(key, force) {
  const owner = await withFallback(
    async () => toPromise((await openStore("readonly")).get([key, OWNER_NUMBER])),
    undefined,
  );
  if (owner !== undefined && owner !== TAB_ID && !force && (await isOwnedByOpenTab(key))) return false;
  await withFallback(async () => toPromise((await openStore("readwrite")).put(TAB_ID, [key, OWNER_NUMBER])), undefined);
  tabs.postMessage({ key, type: "claim" });
  ownedKeys.add(key);
  return true;
}

/** Release a result that this tab claimed. @param {string} key */
export function release(key) {
  if (!ownedKeys.delete(key)) return;
  withFallback(async () => {
    const edits = await openStore("readwrite");
    if ((await toPromise(edits.get([key, OWNER_NUMBER]))) === TAB_ID)
      await toPromise(edits.delete([key, OWNER_NUMBER]));
  }, undefined);
}

/** Call `onclaim` when another tab claims a result. @param {string} key @param {() => void} onclaim @param {AbortSignal} signal */
export function listenForClaims(key, onclaim, signal) {
  const onmessage = (/** @type {MessageEvent} */ { data }) => {
    if (data.key === key && data.type === "claim") onclaim();
  };
  tabs.addEventListener("message", onmessage, { signal });
}

/** Ask the other open tabs whether one of them corrects a result. @param {string} key @returns {Promise<boolean>} */
function isOwnedByOpenTab(key) {
  return new Promise((resolve) => {
    const listenAbort = new AbortController();
    const finish = (/** @type {boolean} */ isOwned) => {
      listenAbort.abort();
      resolve(isOwned);
    };
    const onmessage = (/** @type {MessageEvent} */ { data }) =>
      data.key === key && data.type === "owned" && finish(true);
    tabs.addEventListener("message", onmessage, { signal: listenAbort.signal });
    tabs.postMessage({ key, type: "query" });
    setTimeout(() => finish(false), REPLY_TIMEOUT_MILLISECONDS);
  });
}

const tabs = new BroadcastChannel(DATABASE_NAME);
tabs.addEventListener("message", ({ data }) => {
  if (data.type === "query" && ownedKeys.has(data.key)) tabs.postMessage({ key: data.key, type: "owned" });
  if (data.type === "claim") ownedKeys.delete(data.key);
});
