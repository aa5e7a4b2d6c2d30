/** Storage of the browser. It can be blocked, disabled or full. Values that are not saved apply until the page is closed. */

/** @param {"localStorage" | "sessionStorage"} storage @param {string} key @returns {string | null} null if no value is stored or readable */
export function loadValue(storage, key) {
  try {
    return window[storage].getItem(key);
  } catch {
    return null;
  }
}

/** @param {"localStorage" | "sessionStorage"} storage @param {string} key @param {string} value */
export function saveValue(storage, key, value) {
  try {
    window[storage].setItem(key, value);
  } catch {
    // The value is not saved.
  }
}

/** Load a list that was saved as JSON. @param {string} key @returns {any[]} empty if no list is stored or readable */
export function loadList(key) {
  try {
    const list = JSON.parse(loadValue("localStorage", key) ?? "[]");
    return Array.isArray(list) ? list : [];
  } catch {
    return [];
  }
}
