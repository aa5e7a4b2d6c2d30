/** State that several views show: it changes only by `set`, which tells those who have subscribed. */

/** @template {object} State */
export class Store {
  /** @param {State} state */
  constructor(state) {
    /** A new object after each change. @type {Readonly<State>} */
    this.state = state;
    /** @type {Set<(before: Readonly<State>) => void>} */
    this.listeners = new Set();
  }

  /** @param {Partial<State>} changes values that are replaced; listeners are called when one of them is another one */
  set(changes) {
    const before = this.state;
    const after = { ...before, ...changes };
    if (!hasChanged(before, after, /** @type {(keyof State)[]} */ (Object.keys(changes)))) return;
    this.state = after;
    for (const listener of this.listeners) listener(before);
  }

  /** @param {(before: Readonly<State>) => void} listener is called after each change, with the state before @param {AbortSignal} [signal] */
  subscribe(listener, signal) {
    this.listeners.add(listener);
    signal?.addEventListener("abort", () => this.listeners.delete(listener));
  }
}

/** @template State @param {State} before @param {State} after @param {(keyof State)[]} names @returns {boolean} whether one of these values is another one */
export function hasChanged(before, after, names) {
  return names.some((name) => before[name] !== after[name]);
}
