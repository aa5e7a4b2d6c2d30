/** Store for corrections in this browser (IndexedDB). Stored corrections survive a reload of the page. */

import { Database, toPromise, waitForCommit, withFallback } from "../core/database.js";

/** @typedef {import("./label_edit.js").Edit} Edit */
/**
 * Labels before any correction. They remain available after the service has deleted the result.
 * @typedef {object} OriginalLabels
 * @property {Blob} zipped label values in C order, compressed with gzip
 * @property {number} bytes number of bytes per label value
 * @property {import("./planes.js").Triple} shape
 * @property {import("openapi").VoxelSize | null} voxelSize
 */

const DATABASE_NAME = "stackseg-corrections";
const STORE_NAME = "edits";
// The key of a record is [key of the result, record number]. Records with nonnegative numbers are corrections,
// numbered in the order in which they were made. Records with negative numbers contain other data of the result.
/** Record number of the id of the tab that corrects the result. */
const OWNER_RECORD_NUMBER = -1;
/** Record number of the ids of the annotated stacks that were created from the result in this browser. */
const ANNOTATIONS_RECORD_NUMBER = -2;
/** Record number of the labels before any correction. */
const ORIGINAL_LABELS_RECORD_NUMBER = -3;
/** Record number of the region in which every object is labeled. */
const REGION_RECORD_NUMBER = -4;
/** Record number of the description of an annotation, which the start screen lists. */
const DESCRIPTION_RECORD_NUMBER = -5;
const FIRST_RECORD_NUMBER = DESCRIPTION_RECORD_NUMBER;
const TAB_ID = `${Date.now()}-${Math.random()}`;
/** How long to wait for replies from other tabs. */
const REPLY_TIMEOUT_MILLISECONDS = 1000;
/** Keys of the results that this tab corrects. @type {Set<string>} */
const ownedKeys = new Set();

const database = new Database(DATABASE_NAME, { [STORE_NAME]: {} });

/** @param {IDBTransactionMode} mode @returns {Promise<IDBObjectStore>} */
function openStore(mode) {
  return database.openStore(STORE_NAME, mode);
}

/** Return the key of the corrections of labels. @param {{id: string, isSeries: boolean}} source of the labels @param {number} time time point, used if each time point has its own labels */
export function makeKey({ id, isSeries }, time) {
  return isSeries ? `${id}@${time}` : id;
}

/** @param {string} key of a result, or of one time point of a time series @returns {IDBKeyRange} the keys of its corrections */
function getCorrectionRange(key) {
  return IDBKeyRange.bound([key, 0], [key, Number.MAX_SAFE_INTEGER]);
}

/** @param {string} key @returns {Promise<Edit[]>} the stored corrections of a result, which do not include undone corrections */
export function loadCorrections(key) {
  return withFallback(
    async () => toPromise((await openStore("readonly")).getAll(getCorrectionRange(key))),
    /** @type {Edit[]} */ ([]),
  );
}

/** @param {string} key @returns {Promise<number>} the number of stored corrections of a result */
export function countCorrections(key) {
  return withFallback(async () => toPromise((await openStore("readonly")).count(getCorrectionRange(key))), 0);
}

/**
 * Store a correction at its index, and delete all later corrections. If `edit` is null, only delete the corrections
 * from this index onward.
 * @param {string} key @param {number} index @param {Edit | null} edit
 * @returns {Promise<"saved" | "owned-by-other-tab" | "unavailable">} owned-by-other-tab: nothing was written
 */
export function saveCorrection(key, index, edit) {
  return withFallback(async () => {
    const store = await openStore("readwrite");
    const owner = await toPromise(store.get([key, OWNER_RECORD_NUMBER]));
    if (owner !== undefined && owner !== TAB_ID) return "owned-by-other-tab";
    store.delete(IDBKeyRange.bound([key, index], [key, Number.MAX_SAFE_INTEGER]));
    if (edit !== null) store.put(edit, [key, index]);
    await waitForCommit(store.transaction);
    return "saved";
  }, "unavailable");
}

/** @param {string} job @returns {Promise<string[]>} ids of the annotated stacks created from a result in this browser */
export function loadAnnotationIds(job) {
  return withFallback(
    async () => (await toPromise((await openStore("readonly")).get([job, ANNOTATIONS_RECORD_NUMBER]))) ?? [],
    [],
  );
}

/** Record that an annotated stack was created from a result. @param {string} job @param {string} annotation id */
export async function addAnnotationId(job, annotation) {
  const existingIds = await loadAnnotationIds(job);
  await withFallback(
    async () =>
      toPromise((await openStore("readwrite")).put([...existingIds, annotation], [job, ANNOTATIONS_RECORD_NUMBER])),
    undefined,
  );
}

/** @returns {Promise<Map<string, number>>} the number of stored corrections by key */
export function countAllCorrections() {
  return withFallback(async () => {
    const keys = /** @type {[string, number][]} */ (await toPromise((await openStore("readonly")).getAllKeys()));
    const countByKey = new Map();
    for (const [key, recordNumber] of keys) if (recordNumber >= 0) countByKey.set(key, (countByKey.get(key) ?? 0) + 1);
    return countByKey;
  }, new Map());
}

/** @param {string} key @returns {Promise<OriginalLabels | undefined>} the labels before any correction */
export function loadOriginalLabels(key) {
  return withFallback(
    async () => toPromise((await openStore("readonly")).get([key, ORIGINAL_LABELS_RECORD_NUMBER])),
    undefined,
  );
}

/** @param {string} key @param {OriginalLabels} labels */
export function saveOriginalLabels(key, labels) {
  return withFallback(
    async () => toPromise((await openStore("readwrite")).put(labels, [key, ORIGINAL_LABELS_RECORD_NUMBER])),
    undefined,
  );
}

/** @param {string} key @returns {Promise<import("./annotated_region.js").Region | undefined>} the region in which every object is labeled */
export function loadRegion(key) {
  return withFallback(async () => toPromise((await openStore("readonly")).get([key, REGION_RECORD_NUMBER])), undefined);
}

/** @param {string} key @param {import("./annotated_region.js").Region} region */
export function saveRegion(key, region) {
  return withFallback(
    async () => toPromise((await openStore("readwrite")).put(region, [key, REGION_RECORD_NUMBER])),
    undefined,
  );
}

/**
 * Description of an annotation that was started from nothing.
 * @typedef {{name: string, fragment: string, objectCount: number, regionText: string, changed: string, shape: import("./planes.js").Triple, voxelSize: import("openapi").VoxelSize | null}} AnnotationDescription
 *   name: file name of the stack; fragment: URL fragment that opens the annotation; changed: time of the newest edit
 */

/** @param {string} key @param {AnnotationDescription} description */
export function saveDescription(key, description) {
  return withFallback(
    async () => toPromise((await openStore("readwrite")).put(description, [key, DESCRIPTION_RECORD_NUMBER])),
    undefined,
  );
}

/** @returns {Promise<[string, AnnotationDescription][]>} keys and descriptions of the annotations that were started from nothing */
export function loadDescriptions() {
  return withFallback(
    async () => {
      const store = await openStore("readonly");
      const keys = /** @type {[string, number][]} */ (await toPromise(store.getAllKeys()));
      const ownKeys = keys.filter(([, recordNumber]) => recordNumber === DESCRIPTION_RECORD_NUMBER);
      const descriptions = await Promise.all(ownKeys.map((key) => toPromise(store.get(key))));
      return ownKeys.map(([key], index) => [key, descriptions[index]]);
    },
    /** @type {[string, AnnotationDescription][]} */ ([]),
  );
}

/** Delete all records of a job or annotation, including the records of its time points. @param {string} job */
export function forgetCorrections(job) {
  return withFallback(async () => {
    const store = await openStore("readwrite");
    for (const [firstKey, lastKey] of [
      [job, job],
      [`${job}@`, `${job}@\uffff`],
    ])
      store.delete(IDBKeyRange.bound([firstKey, FIRST_RECORD_NUMBER], [lastKey, Number.MAX_SAFE_INTEGER]));
  }, undefined);
}

/**
 * Claim a result for this tab, so that only one tab corrects the result at a time. The claim is stored with the
 * corrections and checked at every write, because Web Locks are available only over HTTPS. Claims of closed tabs are
 * ignored.
 * @param {string} key @param {boolean} force whether to claim the result even if another open tab corrects it
 * @returns {Promise<boolean>} false if another open tab corrects the result
 */
export async function claimResult(key, force) {
  const owner = await withFallback(
    async () => toPromise((await openStore("readonly")).get([key, OWNER_RECORD_NUMBER])),
    undefined,
  );
  if (owner !== undefined && owner !== TAB_ID && !force && (await isOwnedByOpenTab(key))) return false;
  await withFallback(
    async () => toPromise((await openStore("readwrite")).put(TAB_ID, [key, OWNER_RECORD_NUMBER])),
    undefined,
  );
  tabChannel.postMessage({ key, type: "claim" });
  ownedKeys.add(key);
  return true;
}

/** Release a result that this tab claimed. @param {string} key */
export function releaseResult(key) {
  if (!ownedKeys.delete(key)) return;
  withFallback(async () => {
    const store = await openStore("readwrite");
    if ((await toPromise(store.get([key, OWNER_RECORD_NUMBER]))) === TAB_ID)
      await toPromise(store.delete([key, OWNER_RECORD_NUMBER]));
  }, undefined);
}

/** Call `onclaim` when another tab claims a result. @param {string} key @param {() => void} onclaim @param {AbortSignal} signal */
export function listenForClaims(key, onclaim, signal) {
  const onmessage = (/** @type {MessageEvent} */ { data }) => {
    if (data.key === key && data.type === "claim") onclaim();
  };
  tabChannel.addEventListener("message", onmessage, { signal });
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
    tabChannel.addEventListener("message", onmessage, { signal: listenAbort.signal });
    tabChannel.postMessage({ key, type: "query" });
    setTimeout(() => finish(false), REPLY_TIMEOUT_MILLISECONDS);
  });
}

const tabChannel = new BroadcastChannel(DATABASE_NAME);
tabChannel.addEventListener("message", ({ data }) => {
  if (data.type === "query" && ownedKeys.has(data.key)) tabChannel.postMessage({ key: data.key, type: "owned" });
  if (data.type === "claim") ownedKeys.delete(data.key);
});
