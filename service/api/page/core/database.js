/** Database in this browser (IndexedDB). It is not available if the browser blocks storage, as some do in private windows. */

/** Convert a database request to a promise. @template T @param {IDBRequest<T>} request @returns {Promise<T>} */
export function toPromise(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Wait until a transaction is written. It fails even though its requests have succeeded if the disk or the quota of the browser is full. @param {IDBTransaction} transaction @returns {Promise<void>} */
export function waitForCommit(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

/** Access a database, or return a fallback if the browser does not store data. @template T @param {() => Promise<T>} access @param {T} fallback @returns {Promise<T>} */
export async function withFallback(access, fallback) {
  try {
    return await access();
  } catch {
    return fallback;
  }
}

/** Database that is opened when it is first used. */
export class Database {
  /** @param {string} name @param {Record<string, IDBObjectStoreParameters>} stores options of the object stores by name */
  constructor(name, stores) {
    this.name = name;
    this.stores = stores;
    /** @type {Promise<IDBDatabase> | null} */
    this.connection = null;
  }

  /** @param {string} storeName @param {IDBTransactionMode} mode @returns {Promise<IDBObjectStore>} */
  async openStore(storeName, mode) {
    this.connection ??= this.#connect();
    return (await this.connection).transaction(storeName, mode).objectStore(storeName);
  }

  async #connect() {
    // The next access tries again if the database cannot be opened, or if the browser closes it.
    const disconnect = () => {
      this.connection = null;
    };
    try {
      const request = indexedDB.open(this.name, 1);
      request.onupgradeneeded = () => {
        for (const [name, options] of Object.entries(this.stores)) request.result.createObjectStore(name, options);
      };
      const database = await toPromise(request);
      database.onclose = disconnect;
      return database;
    } catch (error) {
      disconnect();
      throw error;
    }
  }
}
