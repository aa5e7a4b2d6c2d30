/** Corrections of results in this browser (IndexedDB), so that nothing is lost when the page is loaded again. */

/** @typedef {import("./label_edit.js").Edit} Edit */

const NAME = "stackseg-corrections";
const EDITS = "edits";

/** @template T @param {IDBRequest<T>} asked @returns {Promise<T>} */
function answer(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

/** @type {Promise<IDBDatabase> | null} */
let opening = null;

/** @param {IDBTransactionMode} mode @returns {Promise<IDBObjectStore>} */
async function store(mode) {
  if (opening === null) {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(EDITS);
    opening = answer(asked);
  }
  return (await opening).transaction(EDITS, mode).objectStore(EDITS);
}

/** @param {string} job @returns {IDBKeyRange} its corrections, whose keys are [job, number] */
function all(job) {
  return IDBKeyRange.bound([job, 0], [job, Number.MAX_SAFE_INTEGER]);
}

/** A browser that keeps nothing, as in private windows, is not an error. @template T @param {() => Promise<T>} work @param {T} otherwise @returns {Promise<T>} */
async function tolerant(work, otherwise) {
  try {
    return await work();
  } catch {
    return otherwise;
  }
}

/** @param {string} job @returns {Promise<Edit[]>} the corrections of a result that were not taken back */
export function load(job) {
  return tolerant(async () => answer((await store("readonly")).getAll(all(job))), /** @type {Edit[]} */ ([]));
}

/** @param {string} job @returns {Promise<number>} how many corrections of a result are kept */
export function count(job) {
  return tolerant(async () => answer((await store("readonly")).count(all(job))), 0);
}

/** Keep the newest correction as the one with this number, or forget what comes from there on. @param {string} job @param {number} number @param {Edit | null} edit @returns {Promise<boolean>} whether it is kept */
export function keep(job, number, edit) {
  return tolerant(async () => {
    const edits = await store("readwrite");
    edits.delete(IDBKeyRange.bound([job, number], [job, Number.MAX_SAFE_INTEGER]));
    if (edit !== null) await answer(edits.put(edit, [job, number]));
    return true;
  }, false);
}

/** @param {string} job whose result is gone */
export function forget(job) {
  return keep(job, 0, null);
}
